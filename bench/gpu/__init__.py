"""The benchmark on a GPU. `python -m bench` measures the CPU."""

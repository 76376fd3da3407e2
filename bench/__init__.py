"""The benchmark: `python -m bench`, run from the repository's root. CONTRIBUTING.md says how to use it honestly."""

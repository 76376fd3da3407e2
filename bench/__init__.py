"""What is run from the repository's root alone: pytest-benchmark's half, GPU scripts, traffic, and results.

The benchmark itself is `fusedaccum.benchmark`. CONTRIBUTING.md says how to use it honestly.
"""

"""The benchmark: `python -m fusedaccum bench`. CONTRIBUTING.md says how to use it honestly.

Nothing here is imported by the rest of the package but its command line.
"""

"""python -m bench: the same as python -m fusedaccum bench."""

import sys

from fusedaccum.cli import main

if __name__ == "__main__":
    sys.exit(main(["bench", *sys.argv[1:]]))

"""python -m fusedaccum"""

import sys

from fusedaccum.cli import main

if __name__ == "__main__":
    sys.exit(main())

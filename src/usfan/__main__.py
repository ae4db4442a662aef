"""`python -m usfan` is the command line."""

import sys

from usfan.cli import main

if __name__ == "__main__":
    sys.exit(main())

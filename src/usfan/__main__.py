"""`python -m usfan` is the command line."""

import sys

from usfan.cli.main import main

if __name__ == "__main__":
    sys.exit(main())

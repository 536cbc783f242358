"""The words on the command line go in; the exit code comes out."""

import sys

from runner.cli import main

if __name__ == "__main__":
    sys.exit(main())

"""The words on the command line go in; the exit code comes out."""

import os
import sys

# OpenMP reads it when torch is loaded. Threads of one operation wait for each other; by default they hold their cores for
# milliseconds meanwhile, and what they wait for may need one of those: beside other busy processes 48 steps of the CNN took
# 72 s and 29 s of CPU, and 2 to 7 s and 8 to 12 s of CPU since (2 threads, 2 cores at a load of 9 to 12, 2026-11).
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "1000")

from runner.cli import main

if __name__ == "__main__":
    sys.exit(main())

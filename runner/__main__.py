"""Starts the command line."""

import gc
import os
import sys

# OpenMP reads it when torch is loaded. Threads of one operation wait for each other, and by default hold their cores
# for milliseconds, which makes a step several times slower if other processes are busy.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> int:
    """Return the exit code, also of a Ctrl-C during the imports."""
    try:
        from runner.cli import main as run

        return run()
    except KeyboardInterrupt:
        exec("")  # else CPython may end the process by the signal: see runner.cli.dispatch
        return 130


if __name__ == "__main__":
    code = main()
    gc.freeze()  # else the interpreter looks for cycles among torch's objects at its end, for a second
    sys.exit(code)

"""The words on the command line go in; the exit code comes out."""

import gc
import os
import sys

# OpenMP reads it when torch is loaded. Threads of one operation wait for each other, and by default hold their cores
# for milliseconds meanwhile, which next to other busy processes makes a step several times slower.
if "OMP_WAIT_POLICY" not in os.environ:
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")


def main() -> int:
    """Returns the exit code: also of a Ctrl-C while the commands are being imported."""
    try:
        try:
            from runner.cli import main as run  # 0.5 s, in which somebody may think better of it
        except ModuleNotFoundError as error:
            return _tell_missing(error)
        return run()
    except KeyboardInterrupt:
        exec("")  # else CPython may end the process by the signal: see runner.cli.dispatch
        return 130


def _tell_missing(error: ModuleNotFoundError) -> int:
    import json

    from runner.config import packages
    from runner.errors import MISTAKE, as_facts, print_error

    if (told := packages.missing(error)) is None:
        raise error
    print_error(told)
    if "--json" in sys.argv:
        print(json.dumps(as_facts(told), indent=2))
    return MISTAKE


if __name__ == "__main__":
    code = main()
    gc.freeze()  # at its end the interpreter looks for circles among torch's objects again and again: 1.3 s (2026-11)
    sys.exit(code)

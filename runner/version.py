"""The version, the distribution's name, the package's directory, and the time of its import, which comes before all others."""

import os
import sys
import time
from pathlib import Path

__version__ = "0.1.0"
#: as in pyproject.toml; the imported package and the command are called runner
DISTRIBUTION = "torch-experiment-runner"

#: this package's directory, and its parent, which is on the path of the processes that we start
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent
#: the built-in configuration: in a wheel runner/conf, in a checkout next to runner/
CONF = HERE / "conf" if (HERE / "conf").is_dir() else PACKAGES / "conf"

#: on perf_counter's clock: when the command `python -m runner` started
IMPORTED = time.perf_counter()


def python_path(*, own: bool) -> str:
    """Return the PYTHONPATH of a process that we start with -P, so that a user's directory `runner` does not shadow this package.

    own: Whether to append the current directory, with the user's modules, unless this process runs with -P itself.
    """
    here = [str(Path.cwd())] if own and not sys.flags.safe_path else []
    return os.pathsep.join([str(PACKAGES), *here, *filter(None, [os.environ.get("PYTHONPATH")])])

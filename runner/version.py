"""The version, the name that the metadata is made of, where the package is found, and when it was imported: before all else."""

import os
import sys
import time
from pathlib import Path

__version__ = "0.1.0"
#: as pyproject.toml has it; the package that is imported, and the command, are called runner
DISTRIBUTION = "torch-experiment-runner"

#: the folder of this package, and the one in which a process that we start finds it
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent
#: the built-in configuration: in a wheel runner/conf, in a checkout next to runner/
CONF = HERE / "conf" if (HERE / "conf").is_dir() else PACKAGES / "conf"

#: on perf_counter's clock: of `python -m runner`, when its command began
IMPORTED = time.perf_counter()


def python_path(*, own: bool) -> str:
    """PYTHONPATH of a process that we start with -P, where a folder `runner` of the person's does not take our place.

    own: whether the person's modules in the current folder are for it, behind ours, as far as this process has them.
    """
    here = [str(Path.cwd())] if own and not sys.flags.safe_path else []
    return os.pathsep.join([str(PACKAGES), *here, *filter(None, [os.environ.get("PYTHONPATH")])])

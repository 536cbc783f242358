"""The version and the name that the metadata is made of, where the package lies, and when it was imported: before all else."""

import time
from pathlib import Path

__version__ = "0.1.0"
#: as pyproject.toml has it; the package that is imported, and the command, are called runner
DISTRIBUTION = "torch-experiment-runner"

#: the folder of this package, and the one in which a process that we start finds it
HERE = Path(__file__).resolve().parent
PACKAGES = HERE.parent

#: on perf_counter's clock: of `python -m runner`, when its command began
IMPORTED = time.perf_counter()

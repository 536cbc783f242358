"""Many runs from one command (`-m`): a grid or a search makes jobs, a launcher runs them, a report compares them.

grid.py and search/sweeper.py define the jobs, sweep.py runs them, and report/ makes the report.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

#: names for configurations and other programs
if TYPE_CHECKING:
    from runner.sweep.grid import Grid as Grid
    from runner.sweep.launchers.local import Slots as Slots
    from runner.sweep.launchers.ray import RayCluster as RayCluster
    from runner.sweep.search.sweeper import Search as Search
else:
    from runner.config.allowed import exports

    __getattr__, __dir__, __all__ = exports(__name__)

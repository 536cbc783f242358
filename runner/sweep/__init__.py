"""Many runs: overrides and a machine go in; jobs, a ledger and a report come out."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: public name -> the module that defines it
HOMES = {
    "Grid": "grid",
    "RayCluster": "launchers.ray",
    "Search": "search.sweeper",
    "Slots": "launchers.local",
}
__all__ = [*HOMES]

if TYPE_CHECKING:
    from runner.sweep.grid import Grid as Grid
    from runner.sweep.launchers.local import Slots as Slots
    from runner.sweep.launchers.ray import RayCluster as RayCluster
    from runner.sweep.search.sweeper import Search as Search
else:
    from runner.config.exports import exports

    __getattr__, __dir__ = exports(__name__, HOMES)

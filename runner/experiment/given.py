"""What whoever starts a run knows of it already: a sweep's slot, a search, a run that is repeated, a launcher."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

from runner.device import Choice, Hardware

if TYPE_CHECKING:  # torch
    from runner.experiment.console import Screen
    from runner.tracking.ahead import Ahead
    from runner.training.observer import Trial
    from runner.training.parts import Parts


@dataclass(frozen=True)
class Membership:
    """What a run knows of the sweep that it belongs to."""

    sweep: str  # the sweep's folder, as a tag
    uid: str  # of the sweep's own run in MLflow
    experiment: str  # that it is in
    name: str  # of this job, e.g. "device=cpu seed=2"
    publishes: bool = True  # False: the sweep's own process sends the journal


@dataclass(frozen=True)
class Repetition:
    """What a run knows of the one that it repeats."""

    of: str  # its id in MLflow, or its folder, as a tag
    check: Callable[[Parts], None]  # before anything is tracked; raises a RunnerError for parts that are not the same


class Checked(NamedTuple):
    """A configuration was checked on this machine, and this is its device."""

    hardware: Hardware
    choice: Choice


@dataclass(frozen=True)
class Given:
    """Nothing of it: a run of its own, in a process that others may need."""

    #: the device, of a sweep's slot or of the process that launched this one
    choice: Choice | None = None
    #: check.check() need not be called again
    checked: Checked | None = None
    member: Membership | None = None
    trial: Trial | None = None
    repetition: Repetition | None = None
    #: a second Ctrl-C, or a signal and `train.grace_seconds`, may end the process from within
    owns_process: bool = False
    #: where it talks, of several runs in one process (None: to the terminal)
    screen: Screen | None = None
    #: the process that publishes, started before this was checked
    publisher: Ahead | None = None
    #: jobs of a sweep that take each step together, it among them
    num_together: int = 1
    #: it is of several processes that a run has started; that one holds the folder
    is_launched: bool = False

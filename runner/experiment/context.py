"""What the caller of a run passes to it: a sweep's slot, a search's trial, the run that it repeats, the process that started it."""

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
    """The sweep that a run belongs to."""

    sweep: str  # the sweep's directory, as a tag
    uid: str  # of the sweep's own run in MLflow
    experiment: str  # that it is in
    name: str  # of this job, e.g. "device=cpu seed=2"
    publishes: bool = True  # False: the sweep's own process sends the journal


@dataclass(frozen=True)
class Repetition:
    """The run that a run repeats."""

    of: str  # its id in MLflow, or its directory, as a tag
    check: Callable[[Parts], None] | None = None  # raises a RunnerError for other parts, before anything is tracked


class Checked(NamedTuple):
    """This machine, and the devices for a configuration that was checked on it."""

    hardware: Hardware
    devices: tuple[Choice, ...]  # one for each process to start; this process's own if it is one of several

    @property
    def choice(self) -> Choice:
        return self.devices[0]


@dataclass(frozen=True)
class RunContext:
    """The circumstances of a run. The defaults are those of a single run in a process that continues afterwards."""

    device: Choice | None = None  # chosen by a sweep's slot or by the process that launched this one
    checked: Checked | None = None  # if the configuration was checked already
    member: Membership | None = None
    trial: Trial | None = None
    repetition: Repetition | None = None
    owns_process: bool = False  # a second Ctrl-C, or `train.grace_seconds` after a signal, may end the process
    screen: Screen | None = None  # None: the terminal
    publisher: Ahead | None = None  # started before the configuration was checked
    is_launched: bool = False  # one of several processes of a run; the one that started them holds the directory

"""Runs of a sweep that differ in numbers, in this process: trained together or separately, with their results."""

import copy
import functools
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import OmegaConf, open_dict

from runner.config.compose import composer
from runner.config.settings import Settings
from runner.device import backends
from runner.device.placement import map_tensors
from runner.distributed.group import Alone
from runner.experiment.build import prepare
from runner.sweep.jobs.run_together import lane_of
from runner.training.fit import fit
from runner.training.observer import Observer
from runner.training.optimizer import AveragedWeights
from runner.training.parts import Parts
from runner.training.result import Result
from runner.training.signals import Stop
from runner.training.stacked.fit import Member, fit_together

CPU = torch.device("cpu")
PARSER = OverridesParser.create()
SMALL = ["data=digits", "data.limit=300", "train.batch_size=50", "train.num_epochs=2", "tracking.enabled=false"]


class Listener(Observer):
    """The measured values of a run, by name and step."""

    def __init__(self):
        self.points = {}
        self.point_steps = []  # the steps of points, in the order of arrival
        self.epochs = []  # steps, and whether their training loss was known
        self.speeds = []  # of windows, in steps per second

    def window(self, window):
        self.point_steps += window.steps.tolist()
        self.speeds.append(window.num_steps / max(window.seconds, 1e-9))
        for step, row in zip(window.steps.tolist(), window.values, strict=True):
            self.points |= {(name, step): float(value) for name, value in zip(window.names, row, strict=True)}
        for name, noted in window.notes.items():
            self.points |= {(name, step): value for step, value in noted}

    def epoch(self, end):
        self.epochs.append((end.step, ("train/loss", end.step) in self.points))

    def values(self, values, *, step, time_ms):
        self.points |= {(name, step): value for name, value in values.items()}


@dataclass
class Run:
    """A run of the sweep."""

    parts: Parts
    settings: Settings
    folder: Path
    listener: Listener = field(default_factory=Listener)
    result: Result | None = None

    def state(self, name="last"):
        return torch.load(self.folder / "checkpoints" / f"{name}.pt", weights_only=True)


@functools.cache
def _composed(*words):
    cfg = composer([])([*SMALL, "device=cpu", *words])
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


def composed(*words):
    return copy.deepcopy(_composed(*words))


def built(folder, words, each, *, in_float64=False):
    """Return the untrained runs and the states of their generators. each: The overrides of each run."""
    runs, generators = [], []
    for number, own in enumerate(each):
        cfg = composed(*words)
        for word in own:  # the others of a composition, which takes 0.2 s
            override = PARSER.parse_override(word)
            OmegaConf.update(cfg, override.key_or_group, override.value(), force_add=True)
        runs.append(Run(prepare(cfg, CPU), Settings.of(cfg), folder / str(number)))
        generators.append(backends.generator_states(CPU))
        if in_float64:
            runs[-1].parts = _widen(runs[-1].parts)
    return runs, generators


def _widen(parts):
    """Convert weights and rows to float64, where rounding is 1e-16; points remain float32."""
    parts.model.double()
    for split in (parts.train, parts.val, parts.test):
        resident = getattr(split, "batches", split)  # augmentation and scaling follow
        resident._rows = map_tensors(resident._rows, lambda rows: rows.double() if rows.is_floating_point() else rows)
    return replace(parts, average=parts.average and AveragedWeights(parts.model, decay=parts.average.decay))


def members_of(runs, generators):
    pairs = zip(runs, generators, strict=True)
    return [Member(run.parts, run.settings, run.folder, run.listener, lane_of(run.settings), own) for run, own in pairs]


def trained_alone(folder, words, each, *, stop=None, in_float64=False):
    runs, generators = built(folder, words, each, in_float64=in_float64)
    for run, states in zip(runs, generators, strict=True):
        backends.set_generator_states(states, CPU)
        run.result = fit(run.parts, run.settings, run.folder, observer=run.listener, stop=stop or Stop(), ranks=Alone())
    return runs


def trained_together(folder, words, each, num_together=None, *, change=None, in_float64=False, **settings):
    """Train the runs together. change: A function for each member before the training; settings: Of fit_together()."""
    runs, generators = built(folder, words, each, in_float64=in_float64)
    members = members_of(runs, generators)
    for member in members if change else ():
        change(member)
    results = fit_together(members, num_together or len(members), say=print, **{"stop": Stop(), **settings})
    for run, result in zip(runs, results, strict=True):
        run.result = result
    return runs


def largest_difference(alone, together):
    """Return the largest difference of the weights, relative to each tensor, and of the points."""
    weights = points = 0.0
    for one, other in zip(alone, together, strict=True):
        assert one.result.status == other.result.status == "finished", other.result.error
        mine, theirs = one.state(), other.state()
        assert mine.keys() == theirs.keys() and mine["optimizer"].keys() == theirs["optimizer"].keys()
        for name, value in mine["model"].items():
            value, distance = value.double(), (value.double() - theirs["model"][name].double()).norm()
            weights = max(weights, float(distance / (value.norm() + 1e-9)))
        assert one.listener.points.keys() == other.listener.points.keys()
        for key, value in one.listener.points.items():
            points = max(points, abs(other.listener.points[key] - value) / (abs(value) + 1e-3))
    return weights, points

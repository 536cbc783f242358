"""`tune`: finds the fastest settings that give the same numbers on this machine, and writes conf/tuned/NAME.yaml.

It takes the run's own steps on the real device, in the command's process; tune_options.py has what is tried. It leaves the
file and no run.
"""

from __future__ import annotations

import gc
import os
import platform
import re
import shlex
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from runner.device import backends, probe
from runner.errors import Problem, RunnerError, refuse
from runner.experiment.build_data import prepare_data
from runner.experiment.check import check
from runner.experiment.compose_run import composed
from runner.experiment.terminal import say
from runner.plan.command import planning
from runner.plan.tune_measure import NOISE, NUM_LOSSES, Candidate, Comparison, compare, difference, is_same
from runner.plan.tune_options import Option, in_words, options, with_settings

#: what a compilation takes at least, and what part of a step it may save at most
LEAST_SECONDS_TO_COMPILE, MOST_SAVED = 8.0, 0.75
SLOWER = "slower"
#: of the time there is, what a comparison takes
SHARE = 0.08
LEAST_SECONDS = 0.5


@dataclass
class Row:
    """What came of one try. ratio: the time of its step by that of the run as it is."""

    settings: dict[str, Any]
    outcome: str
    step_seconds: float | None = None
    ratio: float | None = None
    setup_seconds: float | None = None
    difference: float | None = None


#: losses of the first steps, and the name of the precision that they were computed in
Numbers = tuple[Any, str]


@dataclass
class Search:
    """A run, and what has been found for it so far."""

    cfg: DictConfig
    device: torch.device
    seconds: float
    tell: Callable[[Row], None]  # hears of each try
    rows: list[Row] = field(default_factory=list)
    settings: dict[str, Any] = field(default_factory=dict)  # of the one that leads
    ratio: float = 1.0  # of the one that leads: its step's time by that of the run as it is
    ahead: float = 0.0  # likewise: seconds before its steps, beside those of the run as it is
    # that what is tried has to give: the run's, or those of a precision that has won
    numbers: Numbers = field(init=False)

    def read(self) -> None:
        """Reads the rows, which all that are tried share. Raises: RunnerError."""
        data = prepare_data(with_settings(self.cfg, {}), self.device)
        for batches in data.loaders.values():  # each has its own
            batches.close()
        self.data = replace(data, loaders={})

    def begin(self, plan: dict[str, Any]) -> None:
        """Builds the run as it is; where the plan says that it does not fit, with what it proposes. Raises: RunnerError."""
        self.needed = {"train.recompute": [plan["recompute"]]} if plan.get("recompute") else {}
        self.settings = dict(self.needed)
        try:
            self.usual = self.holder = self._candidate(self.settings)
        except Exception as error:
            if not backends.is_out_of_memory(error):
                raise
            fix = "run `python -m runner plan` with the same arguments, which says what fits"
            raise RunnerError.of(
                "tune", "a step of the run doesn't fit into memory", fix, code="unknown-flag"
            ) from error
        self.numbers = _numbers(self.usual)
        self.step_seconds, self.num_steps = self.usual.step_seconds, self.usual.parts.limits.num_steps
        self._end = time.monotonic() + self.seconds

    def options(self, plan: dict[str, Any], precisions: Sequence[str]) -> list[Option]:
        cfg = with_settings(self.cfg, self.needed)
        return options(cfg, self.usual.parts, plan, precisions=precisions)

    def take(self, option: Option) -> None:
        """Tries each answer of an option on top of what leads."""
        if option.why_not:
            self._add(Row({option.name: ""}, f"not tried: {option.why_not}"))
        for each in option.tries:
            steps = self.ratio * self.step_seconds * self.num_steps
            if each.get("train.compile") and MOST_SAVED * steps < LEAST_SECONDS_TO_COMPILE:
                why = f"it takes {LEAST_SECONDS_TO_COMPILE:.0f} s or more, and the run's steps take {steps:.1f} s"
                self._add(Row(each, f"not tried: {why}"))
            elif self._try(each) == SLOWER and option.goes_on:
                break

    def confirm(self) -> None:
        """Holds what leads against the run as it is once more: what does not win in the whole run's time is not taken."""
        if self.settings == self.needed:
            return
        found = compare(self.usual, self.holder, seconds=max(LEAST_SECONDS, SHARE * self.seconds))
        self.ratio = found.ratio
        if not (found.is_beyond_noise and self._gains(found, self.ahead, 0.0)):
            self._add(Row(self.settings, "at the end no faster than the run as it is", ratio=found.ratio))
            self.settings, self.ratio, self.ahead = dict(self.needed), 1.0, 0.0

    def close(self) -> None:
        for candidate in {id(each): each for each in (self.usual, self.holder)}.values():
            candidate.close()

    def _candidate(self, settings: dict[str, Any]) -> Candidate:
        return Candidate(with_settings(self.cfg, settings), self.device, read=self.data)

    def _try(self, each: dict[str, Any]) -> str:
        if time.monotonic() > self._end:
            return self._add(Row(each, f"not tried: {self.seconds:.0f} s were over (--seconds)"))
        settings = {**self.settings, **each}
        try:
            candidate = self._candidate(settings)
        except Exception as error:
            if not isinstance(error, RunnerError) and not backends.is_out_of_memory(error):
                raise
            why = error.problems[0].message if isinstance(error, RunnerError) else "out of memory"
            return self._add(Row(each, f"refused: {why}"))
        row = Row(each, "", candidate.step_seconds, setup_seconds=candidate.setup_seconds)
        losses, precision = self.numbers
        if "train.precision" not in each and not is_same(losses, candidate.losses, precision=precision):
            row.outcome = "other numbers"
        else:
            seconds = max(LEAST_SECONDS, SHARE * self.seconds)
            found = compare(self.holder, candidate, seconds=seconds)
            row.step_seconds, row.ratio = found.step_seconds, self.ratio * found.ratio
            row.outcome = self._judged(found, settings, candidate)
        row.difference = difference(self.usual.losses, candidate.losses)
        self._add(row)
        loser = candidate
        if row.outcome == "wins":
            self.settings, self.ratio, self.ahead = settings, self.ratio * found.ratio, self._ahead(candidate, settings)
            loser, self.holder = self.holder, candidate
            if "train.precision" in each:
                self.numbers = _numbers(candidate)
        if loser is not self.usual:
            loser.close()
            gc.collect()
        return row.outcome

    def _add(self, row: Row) -> str:
        self.rows.append(row)
        self.tell(row)
        return row.outcome

    def _judged(self, found: Comparison, settings: dict[str, Any], candidate: Candidate) -> str:
        if not found.is_beyond_noise:
            return SLOWER if found.ratio > 1 + NOISE else "no faster beyond the noise"
        if not self._gains(found, self._ahead(candidate, settings), self.ahead):
            return f"too short a run: {candidate.setup_seconds:.0f} s of compiling are not won back"
        return "wins"

    def _ahead(self, candidate: Candidate, settings: dict[str, Any]) -> float:
        is_compiled = bool(settings.get("train.compile"))
        return candidate.setup_seconds - self.usual.setup_seconds if is_compiled else 0.0

    def _gains(self, found: Comparison, ahead: float, holders: float) -> bool:
        own = found.step_seconds * self.num_steps
        return ahead + own < holders + own / found.ratio


def _numbers(candidate: Candidate) -> Numbers:
    return candidate.losses, candidate.parts.precision.name


FOLDER = Path("conf/tuned")
BY_TUNE = "# By tune"  # what a file of its own says
#: that --precision tries, by kind of device
PRECISIONS = {"cpu": ("bf16",), "cuda": ("tf32", "bf16"), "mps": ("bf16", "fp16"), "xpu": ("bf16",)}


def tune(
    flags: Sequence[str], overrides: list[str], *, seconds: float, name: str | None = None, precision: bool = False
) -> dict[str, Any]:
    """Measures, prints, writes; returns what it found. Takes about `seconds`, and a compilation more where one is worth it.

    precision: whether it may change, and with it the numbers. Raises: RunnerError for a configuration that can't be run.
    """
    began = time.monotonic()
    overrides = [word for word in overrides if not word.lstrip("+").startswith("tuned=")]  # it begins anew
    cfg, _ = composed(flags, [*overrides, "tracking.enabled=false"])
    name = _check(cfg, name, _name(cfg, overrides))
    choice = check(cfg, probe())
    search = Search(cfg, torch.device(choice.here), seconds, _tell)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the run itself will give them
        with planning(cfg) as answer:
            search.read()
            plan = answer()
        search.begin(plan)
        say(
            f"as it is  {search.step_seconds * 1e3:.3g} ms a step, {search.num_steps:,} steps, {choice.device} ({choice.reason})"
        )
        try:
            others = [each for each in PRECISIONS[search.device.type] if each != search.usual.parts.precision.name]
            for option in search.options(plan, others if precision else []):
                search.take(option)
            search.confirm()
            found = _as_values(search, choice.device, plan)
        finally:
            search.close()
    found["seconds"] = time.monotonic() - began
    found["file"], found["use"] = str(_file(name)), _use(flags, overrides, name)
    _write(found, found["settings"] or {"train.compile": cfg.train.compile})
    _show(found)
    return found


def _check(cfg: DictConfig, name: str | None, usual: str) -> str:
    found = []
    if cfg.train.num_processes not in ("auto", 1) or cfg.device == "all":
        problem = "`tune` measures one process, and several wait for each other"
        found.append(Problem("tune of several processes", problem, "use `device=cuda:0 train.num_processes=1`"))
    if name is not None and not re.fullmatch(r"[\w.-]+", name):
        found.append(
            Problem.suggest(f"--name {name}", "`--name` must be a plain file name (in conf/tuned)", ["--name fast"])
        )
    elif (file := _file(name or usual)).is_file() and BY_TUNE not in file.read_text(encoding="utf-8", errors="replace"):
        asked = f"--name {name}" if name else "tune"
        found.append(
            Problem.suggest(asked, f"`{file}` exists, and `tune` did not write it", [f"--name {name or usual}_2"])
        )
    refuse(found)
    return name or usual


def _file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def _name(cfg: DictConfig, overrides: Sequence[str]) -> str:
    recipes = [word.partition("=")[2] for word in overrides if word.startswith(("experiment=", "+experiment="))]
    model = str(cfg.model.get("_target_", "model")).rpartition(".")[2].lower()
    return re.sub(r"[^\w.-]+", "_", recipes[-1] if recipes else f"{cfg.data.name}_{model}")


def _use(flags: Sequence[str], overrides: Sequence[str], name: str) -> str:
    own = [word for word in overrides if not word.lstrip("+").startswith(("tracking.", "hydra."))]
    return shlex.join(["python", "-m", "runner", *flags, *own, f"tuned={name}"])


def _as_values(search: Search, device: str, plan: dict[str, Any]) -> dict[str, Any]:
    leads = search.settings != search.needed
    losses = (search.holder if leads else search.usual).losses
    return {
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "settings": search.settings,
        "is_default": not leads,
        "fits_as_it_is": plan["fits"],
        "step_seconds": search.step_seconds,
        "num_steps": search.num_steps,
        "ratio": search.ratio,
        "losses_compared": min(len(losses), NUM_LOSSES),
        "losses_differ_by": difference(search.usual.losses, losses),
        "tried": [asdict(row) for row in search.rows],
    }


def _write(found: dict[str, Any], settings: dict[str, Any]) -> None:
    tree = OmegaConf.create()
    for key, value in settings.items():
        OmegaConf.update(tree, key, value)
    lines = [
        "# @package _global_",
        f"# {found['use']}",
        f"{BY_TUNE}, {found['device']}: {found['machine']}. {_said(found)}",
    ]
    file = Path(found["file"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(lines) + "\n" + OmegaConf.to_yaml(tree))


def _said(found: dict[str, Any]) -> str:
    if found["is_default"]:
        what = "the run, made to fit the memory" if found["settings"] else "the run as it is"
        return f"Nothing was faster beyond the noise: it is {what}."
    num, by = found["losses_compared"], found["losses_differ_by"]
    return f"A step takes {found['ratio']:.2f} of the time, measured again; the first {num} losses differ by {by:.1e} at most."


def _tell(row: Row) -> None:
    name = in_words(row.settings).rstrip("=")
    figures = "" if row.ratio is None else f"{row.ratio:.2f} times as long, "
    by = "" if row.difference is None else f"; losses differ by {row.difference:.1e}"
    say(f"  {name:<46} {figures}{row.outcome}{by}")


def _show(found: dict[str, Any]) -> None:
    say(f"takes     {in_words(found['settings']) or 'the run as it is'}")
    say(f"          {_said(found)}")
    say(f"written   {found['file']}, in {found['seconds']:.0f} s; {found['use']}")

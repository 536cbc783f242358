"""`tune`: find the fastest settings with the same numbers on this machine, and write conf/tuned/NAME.yaml.

It takes the run's steps on the real device, in the command's process, and makes no run.
"""

from __future__ import annotations

import copy
import gc
import os
import platform
import re
import shlex
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf
from torch import nn
from torch.utils.data import Dataset

from runner.command import Arguments
from runner.data.loading.own_loader import OwnLoader
from runner.device import backends, probe
from runner.errors import Problem, RunnerError, refuse
from runner.experiment import rules
from runner.experiment.build_data import prepare_data
from runner.experiment.check import check, composed
from runner.experiment.terminal import say
from runner.tools.tune.measure import NOISE, NUM_LOSSES, Candidate, compare, difference, is_same
from runner.training.parts import Parts

FOLDER = Path("conf/tuned")
WRITTEN_BY = "# By tune"  # a file without this line is the user's
#: minimum seconds of a compilation, and the maximum share of a step that it saves
MIN_COMPILE_SECONDS, MAX_SAVED = 8.0, 0.75
#: seconds of a comparison, as a share of `--seconds`, and at least
COMPARISON_SHARE, MIN_COMPARISON_SECONDS = 0.08, 0.5
#: what --precision tries, by kind of device
PRECISIONS = {"cpu": ("bf16",), "cuda": ("tf32", "bf16"), "mps": ("bf16", "fp16"), "xpu": ("bf16",)}
DROPOUTS = nn.Dropout | nn.Dropout1d | nn.Dropout2d | nn.Dropout3d | nn.AlphaDropout


def tune(arguments: Arguments) -> dict[str, Any]:
    """Measure, print and write; return the result. Takes about `--seconds`, and a compilation if it can pay off.

    Raises:
        RunnerError: For a configuration that can't be run.
    """
    began = time.monotonic()
    # start without tuned settings
    overrides = [word for word in arguments.overrides if not word.lstrip("+").startswith("tuned=")]
    cfg, _ = composed(arguments.flags, [*overrides, "tracking.enabled=false"])
    name = _check(cfg, arguments["--name"], _name(cfg, overrides))
    choice = check(cfg, probe())
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a run prints them
        search = TuneSearch(cfg, torch.device(choice.here), seconds=arguments["--seconds"])
        step = f"{search.step_seconds * 1e3:.3g} ms a step, {search.num_steps:,} steps"
        say(f"as it is  {step}, {choice.device} ({choice.reason})")
        try:
            for option in options(cfg, search.usual.parts, with_precision=arguments["--precision"]):
                search.take(option)
            search.confirm()
            found = _report(search, choice.device)
        finally:
            search.close()
    found["seconds"] = time.monotonic() - began
    found["file"], found["use"] = str(_file(name)), _use(arguments.flags, overrides, name)
    _write(found, found["settings"] or {"train.compile": cfg.train.compile})
    say(f"takes     {in_words(found['settings']) or 'the run as it is'}")
    say(f"          {_said(found)}")
    say(f"written   {found['file']}, in {found['seconds']:.0f} s; {found['use']}")
    return found


@dataclass(frozen=True)
class TuneOption:
    """One option. tries: Its other values, as settings by key; why_not: Why it is not tried."""

    name: str
    tries: tuple[dict[str, Any], ...] = ()
    why_not: str = ""


@dataclass
class TuneRow:
    """The result of one try. ratio: The time of its step, divided by that of the unchanged run."""

    settings: dict[str, Any]
    outcome: str = ""
    step_seconds: float | None = None
    ratio: float | None = None
    setup_seconds: float | None = None
    difference: float | None = None


class TuneSearch:
    """The unchanged run (`usual`), and the fastest one with the same numbers so far."""

    def __init__(self, cfg: DictConfig, device: torch.device, *, seconds: float) -> None:
        """Read the data and take the first steps of the unchanged run. Raises: RunnerError."""
        self.cfg, self.device, self.seconds = cfg, device, seconds
        data = prepare_data(with_settings(cfg, {}), device)
        for batches in data.loaders.values():  # each candidate makes its own
            batches.close()
        self._data = replace(data, loaders={})
        try:
            self.usual = self.fastest = self._candidate({})
        except Exception as error:
            if not backends.is_out_of_memory(error):
                raise
            fix = "run `python -m runner plan` with the same arguments, which says what fits"
            raise RunnerError.of(
                "tune", "a step of the run doesn't fit into memory", fix, code="unknown-flag"
            ) from error
        self.step_seconds, self.num_steps = self.usual.step_seconds, self.usual.parts.limits.num_steps
        self.rows: list[TuneRow] = []
        self.settings: dict[str, Any] = {}  # of the fastest
        self.ratio = 1.0  # time of a step of the fastest run, divided by that of the unchanged run
        self._compile_seconds = 0.0  # of the fastest
        self._numbers = self._numbers_of(self.usual)
        self._end = time.monotonic() + seconds

    def take(self, option: TuneOption) -> None:
        """Try each answer of an option on top of the fastest settings."""
        if option.why_not:
            self._add(TuneRow({option.name: ""}, f"not tried: {option.why_not}"))
        for settings in option.tries:
            row = TuneRow(settings)
            steps = self.ratio * self.step_seconds * self.num_steps
            if settings.get("train.compile") and MAX_SAVED * steps < MIN_COMPILE_SECONDS:
                why = f"it takes {MIN_COMPILE_SECONDS:.0f} s or more, and the run's steps take {steps:.1f} s"
                row.outcome = f"not tried: {why}"
            elif time.monotonic() > self._end:
                row.outcome = f"not tried: {self.seconds:.0f} s were over (--seconds)"
            else:
                self._try(row)
            self._add(row)

    def confirm(self) -> None:
        """Compare the fastest with the unchanged run again; it is dropped unless it wins."""
        if not self.settings:
            return
        found = compare(self.usual, self.fastest, seconds=self._comparison_seconds)
        self.ratio = found.ratio
        if not found.is_faster or self._saved_seconds(found.step_seconds, found.ratio) < self._compile_seconds:
            self._add(TuneRow(self.settings, "at the end no faster than the run as it is", ratio=found.ratio))
            self.settings, self.ratio = {}, 1.0

    def close(self) -> None:
        for candidate in {self.usual, self.fastest}:
            candidate.close()

    @property
    def _comparison_seconds(self) -> float:
        return max(MIN_COMPARISON_SECONDS, COMPARISON_SHARE * self.seconds)

    def _candidate(self, settings: dict[str, Any]) -> Candidate:
        return Candidate(with_settings(self.cfg, settings), self.device, read=self._data)

    def _try(self, row: TuneRow) -> None:
        settings = {**self.settings, **row.settings}
        try:
            candidate = self._candidate(settings)
        except Exception as error:
            if not isinstance(error, RunnerError) and not backends.is_out_of_memory(error):
                raise
            reason = error.problems[0].message if isinstance(error, RunnerError) else "out of memory"
            row.outcome = f"refused: {reason}"
            return
        row.step_seconds, row.setup_seconds = candidate.step_seconds, candidate.setup_seconds
        row.difference = difference(self.usual.losses, candidate.losses)
        compile_seconds = candidate.setup_seconds - self.usual.setup_seconds if settings.get("train.compile") else 0.0
        row.outcome, ratio = self._outcome(row, candidate, compile_seconds - self._compile_seconds)
        loser = candidate
        if row.outcome == "wins":
            loser, self.fastest = self.fastest, candidate
            self.settings, self.ratio, self._compile_seconds = settings, self.ratio * ratio, compile_seconds
            if "train.precision" in row.settings:
                self._numbers = self._numbers_of(candidate)
        if loser is not self.usual:
            loser.close()
            gc.collect()

    def _outcome(self, row: TuneRow, candidate: Candidate, more_compile_seconds: float) -> tuple[str, float]:
        losses, precision = self._numbers
        if "train.precision" not in row.settings and not is_same(losses, candidate.losses, precision=precision):
            return "other numbers", 1.0
        found = compare(self.fastest, candidate, seconds=self._comparison_seconds)
        row.step_seconds, row.ratio = found.step_seconds, self.ratio * found.ratio
        if not found.is_faster:
            outcome = "slower" if found.ratio > 1 + NOISE else "no faster beyond the noise"
        elif self._saved_seconds(found.step_seconds, found.ratio) <= more_compile_seconds:
            outcome = f"too short a run: {candidate.setup_seconds:.0f} s of compiling are not won back"
        else:
            outcome = "wins"
        return outcome, found.ratio

    def _saved_seconds(self, step_seconds: float, ratio: float) -> float:
        return self.num_steps * step_seconds * (1 / ratio - 1)

    def _numbers_of(self, candidate: Candidate) -> tuple[Any, str]:
        return candidate.losses, candidate.parts.precision.name

    def _add(self, row: TuneRow) -> None:
        self.rows.append(row)
        ratio = "" if row.ratio is None else f"{row.ratio:.2f} times as long, "
        losses = "" if row.difference is None else f"; losses differ by {row.difference:.1e}"
        say(f"  {in_words(row.settings).rstrip('='):<46} {ratio}{row.outcome}{losses}")


def options(cfg: DictConfig, parts: Parts, *, with_precision: bool) -> list[TuneOption]:
    """Return the options that may make a run faster, in the order to try: the work of a step first, then compilation."""
    kind = parts.device.type
    found = [_precision(parts, kind, with_precision), _threads(kind), _layout(cfg, parts, kind), _data(cfg, parts)]
    found += [_micro_batches(cfg, parts), _compile(cfg, parts)]
    if kind == "cuda":
        found.append(_graph(cfg, parts))
    return [option for option in found if option.tries or option.why_not]


def _precision(parts: Parts, kind: str, with_precision: bool) -> TuneOption:
    if not with_precision:
        return TuneOption("train.precision", why_not="it changes the numbers: --precision asks for it")
    names = [name for name in PRECISIONS[kind] if name != parts.precision.name]
    return TuneOption("train.precision", tuple({"train.precision": name} for name in names))


def _threads(kind: str) -> TuneOption:
    name, cores = "backends.cpu.num_threads", os.cpu_count() or 1
    if kind != "cpu":
        return TuneOption(name)
    counts = {cores, *(2**power for power in range(cores.bit_length()) if 2**power <= cores)}
    counts -= {torch.get_num_threads()}
    return TuneOption(name, tuple({name: count} for count in sorted(counts)), "" if counts else "there is one core")


def _layout(cfg: DictConfig, parts: Parts, kind: str) -> TuneOption:
    name = f"backends.{kind}.channels_last"
    if "channels_last" not in cfg.backends.get(kind, {}):
        return TuneOption(name)
    if not any(isinstance(module, nn.Conv2d) for module in parts.model.modules()):
        return TuneOption(name, why_not="there are no 2-d convolutions")
    return TuneOption(name, ({name: not parts.layout.startswith("channels last")},))


def _data(cfg: DictConfig, parts: Parts) -> TuneOption:
    if isinstance(parts.splits.train, OwnLoader):
        return TuneOption("data.num_workers", why_not="your own stream has processes of its own, or none")
    if not isinstance(parts.splits.train, Dataset):
        if parts.train.indexed() is not None:
            return TuneOption("data.residency", why_not="its rows are on the device: nothing is read again")
        if cfg.data.residency == "stream":
            return TuneOption("data.residency", ({"data.residency": "auto"},))
    cores = os.cpu_count() or 1
    counts = [count for count in dict.fromkeys([0, 1, max(1, cores // 2), cores]) if count != cfg.data.num_workers]
    return TuneOption("data.num_workers", tuple({"data.num_workers": count} for count in counts))


def _micro_batches(cfg: DictConfig, parts: Parts) -> TuneOption:
    name, size, num = "train.accumulate_steps", int(cfg.train.batch_size), int(cfg.train.accumulate_steps)
    if any(getattr(module, "running_mean", None) is not None for module in parts.model.modules()):
        return TuneOption(name, why_not="batch norm sees each part by itself: other numbers")
    if _has_dropout(parts.model) or parts.source.finish is not None:
        return TuneOption(name, why_not="dropout, or augmentation, draws for each part: other numbers")
    if isinstance(parts.splits.train, Dataset) and parts.train.batch_size != size:
        return TuneOption(name, why_not="its loader makes the batches")
    shares = [share for share in (2, 4) if size % share == 0]
    return TuneOption(name, tuple({"train.batch_size": size // share, name: num * share} for share in shares))


def _has_dropout(model: nn.Module) -> bool:
    return any(isinstance(module, DROPOUTS) and module.p > 0 for module in model.modules())


def _compile(cfg: DictConfig, parts: Parts) -> TuneOption:
    name = "train.compile"
    if cfg.train.compile:
        return TuneOption(name, ({name: False},))
    if reason := rules.why_not(cfg, {name: True}):
        return TuneOption(name, why_not=reason)
    if _has_dropout(parts.model):
        return TuneOption(name, why_not="compiled, dropout draws other numbers")
    if any(isinstance(module, nn.RNNBase) for module in parts.model.modules()):
        return TuneOption(name, why_not="torch.compile leaves recurrent layers as they are")
    return TuneOption(name, ({name: True},))


def _graph(cfg: DictConfig, parts: Parts) -> TuneOption:
    name = "train.cuda_graph"
    if cfg.train.cuda_graph:
        return TuneOption(name, ({name: False},))
    situation = rules.Situation(device=parts.device.type, is_on_device=parts.train.indexed() is not None)
    if reason := rules.why_not(cfg, {name: True}, situation):
        return TuneOption(name, why_not=reason)
    return TuneOption(name, ({name: True},))


def with_settings(cfg: DictConfig, settings: dict[str, Any]) -> DictConfig:
    """Return a copy of a configuration with other values by dotted key."""
    changed = copy.deepcopy(cfg)
    for key, value in settings.items():
        OmegaConf.update(changed, key, value)
    return changed


def in_words(settings: dict[str, Any]) -> str:
    """Return settings as overrides."""
    texts = {key: str(value).lower() if isinstance(value, bool) else value for key, value in settings.items()}
    return " ".join(f"{key}={text}" for key, text in texts.items())


def _check(cfg: DictConfig, name: str | None, usual: str) -> str:
    found = []
    if cfg.train.num_processes not in ("auto", 1) or cfg.device == "all":
        problem = "`tune` measures one process, and several wait for each other"
        found.append(Problem("tune of several processes", problem, "use `device=cuda:0 train.num_processes=1`"))
    file = _file(name or usual)
    if name is not None and not re.fullmatch(r"[\w.-]+", name):
        problem = "`--name` must be a plain file name (in conf/tuned)"
        found.append(Problem.suggest(f"--name {name}", problem, ["--name fast"]))
    elif file.is_file() and WRITTEN_BY not in file.read_text(encoding="utf-8", errors="replace"):
        source = f"--name {name}" if name else "tune"
        problem = f"`{file}` exists, and `tune` did not write it"
        found.append(Problem.suggest(source, problem, [f"--name {name or usual}_2"]))
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


def _report(search: TuneSearch, device: str) -> dict[str, Any]:
    losses = (search.fastest if search.settings else search.usual).losses
    return {
        "device": device,
        "machine": f"{platform.machine()}, {os.cpu_count()} cores, torch {torch.__version__}",
        "settings": search.settings,
        "is_default": not search.settings,
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
    note = f"{WRITTEN_BY}, {found['device']}: {found['machine']}. {_said(found)}"
    file = Path(found["file"])
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("\n".join(["# @package _global_", f"# {found['use']}", note, OmegaConf.to_yaml(tree)]))


def _said(found: dict[str, Any]) -> str:
    if found["is_default"]:
        return "Nothing was faster beyond the noise: it is the run as it is."
    num, largest = found["losses_compared"], found["losses_differ_by"]
    measured = f"A step takes {found['ratio']:.2f} of the time, measured again"
    return f"{measured}; the first {num} losses differ by {largest:.1e} at most."

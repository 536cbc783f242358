"""`tune`: the fastest settings for a run on this machine that give the same numbers, as conf/tuned/NAME.yaml. For cli/after_training.py.

In the command's process, on the real device, with the run's own steps; tune_search.py tries, tune_options.py says what. It
leaves the file, and no run.
"""

from __future__ import annotations

import os
import platform
import re
import shlex
import time
import warnings
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from runner.device import probe
from runner.errors import Fault, refuse
from runner.experiment.check import check
from runner.experiment.compose_run import composed
from runner.experiment.terminal import say
from runner.plan.command import planning
from runner.plan.tune_measure import NUM_LOSSES, difference
from runner.plan.tune_options import in_words
from runner.plan.tune_search import Row, Search

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
    """The name of the file: the one that was asked for, or the usual one. Raises: RunnerError."""
    found = []
    if cfg.train.num_processes not in ("auto", 1) or cfg.device == "all":
        problem = "several processes wait for each other, and one alone shows nothing of that"
        found.append(Fault("tune of several processes", problem, "device=cuda:0 train.num_processes=1"))
    if name is not None and not re.fullmatch(r"[\w.-]+", name):
        found.append(Fault(f"--name {name}", "it is the name of a file in conf/tuned", "--name fast"))
    elif (file := _file(name or usual)).is_file() and BY_TUNE not in file.read_text(encoding="utf-8", errors="replace"):
        asked = f"--name {name}" if name else "tune"
        found.append(Fault(asked, f"{file} is there, and tune has not written it", f"--name {name or usual}_2"))
    refuse(found)
    return name or usual


def _file(name: str) -> Path:
    return FOLDER / f"{name}.yaml"


def _name(cfg: DictConfig, overrides: Sequence[str]) -> str:
    """The experiment's, else that of the data and the model."""
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
    """An overlay, whose first lines say that it is one, as Hydra wants it, and how it is used."""
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
    return f"A step takes {found['ratio']:.2f} of the time; the first {num} losses differ by {by:.1e} at most."


def _tell(row: Row) -> None:
    name = in_words(row.settings).rstrip("=")
    figures = "" if row.ratio is None else f"{row.ratio:.2f} times as long, "
    by = "" if row.difference is None else f"; losses differ by {row.difference:.1e}"
    say(f"  {name:<46} {figures}{row.outcome}{by}")


def _show(found: dict[str, Any]) -> None:
    say(f"takes     {in_words(found['settings']) or 'the run as it is'}")
    say(f"          {_said(found)}")
    say(f"written   {found['file']}, in {found['seconds']:.0f} s; {found['use']}")

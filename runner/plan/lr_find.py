"""`lr-find`: trains some steps with a rising learning rate, and finds the one to take. Called by cli/after_training.py.

In the command's process, on the real device, with the run's own step. It leaves lr_find.json and a picture, and no run.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig
from torch.optim import Optimizer

from runner.data.loading.loaders import Batches
from runner.device import backends, probe
from runner.errors import RunnerError
from runner.experiment import build
from runner.experiment.check import check
from runner.experiment.compose_run import composed
from runner.experiment.terminal import say, short
from runner.plan.lr_curve import Found, suggest
from runner.plan.plot import draw_range_test
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer, Window
from runner.training.parts import Parts
from runner.training.step.train_step import make_step

PULL_EVERY = 10  # steps between copies from the device; so many are trained in vain after the loss has run away
#: a smoothed loss this many times the lowest one has run away
AWAY = 4.0
FILE, PICTURE = "lr_find.json", "lr_find.png"


def find_rate(
    flags: Sequence[str], overrides: list[str], *, num_steps: int, lowest: float, highest: float
) -> dict[str, Any]:
    """Trains, draws, prints; returns what it wrote, and where. Leaves no run, in MLflow or below outputs/. Costs `num_steps` steps at most.

    Raises: RunnerError for a configuration that can't be run, and where the loss never falls.
    """
    if not lowest < highest:
        fix = f"use `--from {highest:g} --to {lowest:g}`"
        raise RunnerError.of(f"--from {lowest:g} --to {highest:g}", "`--from` must be below `--to`", fix)
    cfg, folder = composed(flags, overrides)
    if turns := cfg.optimizer.get("turns"):
        problem = "optimizers that take turns have one rate each, which no single loss can choose"
        fix = f"run a sweep: `-m {' '.join(f'+optimizer.turns.{name}.lr=1e-3,1e-4' for name in turns)}`"
        raise RunnerError.of("lr-find with optimizer.turns", problem, fix)
    choice = check(cfg, probe())
    made = build.prepare(cfg, torch.device(choice.here))
    rates, losses = _tried(
        made,
        _moved(cfg.optimizer, made.optimizer),
        np.geomspace(lowest, highest, num_steps),
        accumulate_steps=cfg.train.accumulate_steps,
        clip_grad_norm=cfg.train.clip_grad_norm,
    )
    found = suggest(rates, losses, away=AWAY)
    title = f"{str(cfg.model.get('_target_', 'model')).rsplit('.', 1)[-1]} on {made.source.name}, {choice.device}"
    report = _report(found, choice.device, choice.reason, num_steps=num_steps, title=title)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(report, indent=2) + "\n")
    draw_range_test(found, folder / PICTURE, title=title)
    _show(report, folder)
    return {**report, "folder": short(folder)}


def _moved(settings: DictConfig, optimizer: Optimizer) -> list[dict[str, Any]]:
    """The optimizer's groups whose rate is optimizer.lr. Raises: RunnerError where there is none."""
    asked = [f"optimizer.groups[{at}].lr" for at, group in enumerate(settings.get("groups") or []) if "lr" in group]
    asked += ["optimizer.adamw_lr"] if settings.get("adamw_lr") is not None else []
    if not asked:
        return optimizer.param_groups
    usual = float(optimizer.defaults["lr"])
    # as it is before a schedule has begun to move it
    found = [group for group in optimizer.param_groups if float(group.get("initial_lr", group["lr"])) == usual]
    if not found:
        problem = "each parameter group sets its own rate, so `optimizer.lr` changes none"
        raise RunnerError.of(
            f"lr-find with {', '.join(asked)}", problem, f"remove {' and '.join(f'`{each}`' for each in asked)}"
        )
    return found


def _tried(
    made: Parts,
    groups: Sequence[dict[str, Any]],
    schedule: Any,
    *,
    accumulate_steps: int,
    clip_grad_norm: float | None,
) -> tuple[Any, Any]:
    step = make_step(
        made.model, made.task, optimizer=made.optimizer, precision=made.precision, clip_grad_norm=clip_grad_norm
    )
    windows: list[Any] = []
    is_away = threading.Event()

    def take(window: Window) -> None:  # in the background
        windows.append(window.values[:, 0])
        if not np.isfinite(windows[-1]).all() or suggest_is_over(np.concatenate(windows)):
            is_away.set()

    background = Background(begin=partial(backends.use_in_thread, made.device))
    buffer = MetricBuffer(made.device, take, background=background, pull_every=PULL_EVERY, watch="")
    made.model.train()
    try:
        for rate, batches in zip(schedule, _groups(made.train, accumulate_steps), strict=False):
            for group in groups:
                group["lr"] = float(rate)
            buffer.write(step(batches))
            if is_away.is_set():
                break
        buffer.pull()
    finally:
        background.close()
        for split in (made.train, made.val, made.test):
            if split is not None:
                split.close()
    losses = np.concatenate(windows)
    return np.asarray(schedule[: len(losses)]), losses


def suggest_is_over(losses: Any) -> bool:
    """Whether the loss is so far above its lowest value that more steps say nothing."""
    from runner.plan.lr_curve import smoothed

    values = smoothed(losses)
    return bool(values[-1] > AWAY * values.min()) if values.min() > 0 else False


def _groups(batches: Batches, size: int) -> Iterator[tuple[Any, ...]]:
    for epoch in count():
        iterator = iter(batches.epoch(epoch))
        while group := tuple(islice(iterator, size)):
            yield group


def _report(found: Found, device: str, reason: str, *, num_steps: int, title: str) -> dict[str, Any]:
    return {
        "title": title,
        "device": device,
        "device_reason": reason,
        "suggested": found.suggested,
        "reason": found.reason,
        "steepest": found.steepest,
        "tenth_of_lowest": found.tenth_of_lowest,
        "lowest": found.lowest,
        "ending": found.ending,
        "num_steps": len(found.rates),
        "num_steps_asked": num_steps,
        "rates": [float(rate) for rate in found.rates],
        "losses": [_plain(value) for value in found.losses],
        "smoothed": [_plain(value) for value in found.smoothed],
    }


def _plain(value: Any) -> float | str:
    return float(value) if math.isfinite(value) else str(float(value))  # JSON has no NaN


def _show(report: dict[str, Any], folder: Path) -> None:
    say(f"tried   {report['title']}: {report['num_steps']} steps, {report['ending']}")
    say(f"steep   {report['steepest']:.1e}  where the smoothed loss falls fastest")
    say(
        f"tenth   {report['tenth_of_lowest']:.1e}  a tenth of the rate with the lowest smoothed loss, {report['lowest']:.1e}"
    )
    say(f"take    optimizer.lr={report['suggested']:.1e}  {report['reason']}")
    say(f"written {short(folder)}/{FILE}, {PICTURE}")

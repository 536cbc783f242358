"""`lr-find`: a learning-rate range test (Smith 2017): train some steps with a rising rate, and suggest a rate.

It takes the run's steps on the real device, and writes lr_find.json and a plot, but no run.
"""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig

from runner.command import Arguments
from runner.data.loading.loaders import Batches
from runner.device import backends, probe
from runner.errors import RunnerError
from runner.experiment import build
from runner.experiment.check import check, composed
from runner.experiment.terminal import say, short
from runner.training.background import Background
from runner.training.metric_buffer import MetricBuffer, Window
from runner.training.parts import Parts
from runner.training.step.train_step import make_step

PULL_EVERY = 10  # steps between copies from the device, after which a diverged test ends
AWAY = 4.0  # a smoothed loss diverges from this multiple of the lowest one
MEMORY = 0.9  # weight of earlier values in the running mean
EDGE = 3  # steps at both ends whose slope is ignored: the mean has only one side there
FILE, PLOT = "lr_find.json", "lr_find.png"


@dataclass(frozen=True)
class RangeTest:
    """Rates, losses and smoothed losses are (n,). steepest: The rate at which the smoothed loss falls fastest."""

    rates: Any
    losses: Any
    smoothed: Any
    steepest: float
    tenth_of_lowest: float
    lowest: float  # rate with the lowest smoothed loss
    suggested: float
    reason: str
    ending: str


def find_rate(arguments: Arguments) -> dict[str, Any]:
    """Train at most `--steps` steps, plot and print; return the content and the path of the file.

    Raises:
        RunnerError: For a configuration that can't be run, or if the loss never falls.
    """
    num_steps, lowest, highest = (arguments[name] for name in ("--steps", "--from", "--to"))
    if not lowest < highest:
        fix = f"use `--from {highest:g} --to {lowest:g}`"
        raise RunnerError.of(f"--from {lowest:g} --to {highest:g}", "`--from` must be below `--to`", fix)
    cfg, folder = composed(arguments.flags, arguments.overrides)
    if turns := cfg.optimizer.get("turns"):
        problem = "optimizers that take turns have one rate each, which no single loss can choose"
        fix = f"run a sweep: `-m {' '.join(f'+optimizer.turns.{name}.lr=1e-3,1e-4' for name in turns)}`"
        raise RunnerError.of("lr-find with optimizer.turns", problem, fix)
    choice = check(cfg, probe())
    parts = build.prepare(cfg, torch.device(choice.here))
    rates, losses = _train(cfg, parts, np.geomspace(lowest, highest, num_steps))
    found = suggest(rates, losses)
    title = f"{str(cfg.model.get('_target_', 'model')).rsplit('.', 1)[-1]} on {parts.source.name}, {choice.device}"
    report = {
        "title": title,
        "device": choice.device,
        "device_reason": choice.reason,
        **asdict(found),
        "num_steps": len(found.rates),
        "num_steps_asked": num_steps,
    }
    for key in ("rates", "losses", "smoothed"):  # JSON has no NaN
        report[key] = [float(value) if math.isfinite(value) else str(float(value)) for value in report[key]]
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(json.dumps(report, indent=2) + "\n")
    _draw(found, folder / PLOT, title=title)
    say(f"tried   {title}: {len(found.rates)} steps, {found.ending}")
    say(f"steep   {found.steepest:.1e}  where the smoothed loss falls fastest")
    say(f"tenth   {found.tenth_of_lowest:.1e}  a tenth of the rate with the lowest smoothed loss, {found.lowest:.1e}")
    say(f"take    optimizer.lr={found.suggested:.1e}  {found.reason}")
    say(f"written {short(folder)}/{FILE}, {PLOT}")
    return {**report, "folder": short(folder)}


def smoothed(losses: Any) -> Any:  # (n,) -> (n,)
    """Return the running mean, corrected for its beginning (Kingma & Ba 2015, section 3)."""
    values = np.empty(len(losses))
    mean = 0.0
    for number, loss in enumerate(losses):
        mean = MEMORY * mean + (1 - MEMORY) * float(loss)
        values[number] = mean / (1 - MEMORY ** (number + 1))
    return values


def suggest(rates: Any, losses: Any) -> RangeTest:
    """Return two rates to try, and the smaller of them; losses that are not finite or diverge end the test.

    Raises:
        RunnerError: If the loss never falls.
    """
    finite = np.isfinite(losses)
    end = len(losses) if finite.all() else int(np.flatnonzero(~finite)[0])
    ending = "to the highest rate" if end == len(losses) else f"until the loss was {losses[end]} at {rates[end]:.1e}"
    values = smoothed(losses[:end])
    away = np.flatnonzero(_has_run_away(values))
    if len(away):
        end, ending = int(away[0]) + 1, f"until the loss had run away at {rates[away[0]]:.1e}"
    values = values[:end]
    if end < 2 * EDGE + 2 or values.argmin() < 2:
        last = max(0, end - 1)
        problem = f"the loss never falls: {losses[0]:.4g} at {rates[0]:.1e}, {losses[last]:.4g} at {rates[last]:.1e}"
        fix = f"use `lr-find --from {rates[0] / 100:.0e}` or more steps, or check the data and the task"
        raise RunnerError.of("lr-find", problem, fix)
    lowest = int(values.argmin())
    slope = np.gradient(values, np.log(rates[:end]))
    steepest = EDGE + int(slope[EDGE : max(EDGE + 1, min(lowest + 1, end - EDGE))].argmin())
    steep_rate, tenth = float(rates[steepest]), float(rates[lowest]) / 10
    why = "from the lowest loss a tenth of the way back, far from where it rises"
    if steep_rate <= tenth:
        why = "the loss falls fastest there"
    return RangeTest(
        rates[:end],
        losses[:end],
        values,
        steep_rate,
        tenth,
        float(rates[lowest]),
        min(steep_rate, tenth),
        f"the smaller of the two: {why}",
        ending,
    )


def _has_run_away(values: Any) -> Any:  # (n,) -> (n,)
    lowest = np.minimum.accumulate(values)
    return (lowest > 0) & (values > AWAY * lowest)


def _train(cfg: DictConfig, parts: Parts, rates: Any) -> tuple[Any, Any]:
    groups, clip_grad_norm = _groups(parts), cfg.train.clip_grad_norm
    step = make_step(
        parts.model, parts.task, optimizer=parts.optimizer, precision=parts.precision, clip_grad_norm=clip_grad_norm
    )
    windows: list[Any] = []
    is_over = threading.Event()

    def take(window: Window) -> None:  # in the background
        windows.append(window.values[:, 0])
        losses = np.concatenate(windows)
        if not np.isfinite(losses).all() or _has_run_away(smoothed(losses))[-1]:
            is_over.set()

    background = Background(begin=partial(backends.use_in_thread, parts.device))
    buffer = MetricBuffer(parts.device, take, background=background, pull_every=PULL_EVERY, checks=False)
    parts.model.train()
    try:
        for rate, batches in zip(rates, _batches(parts.train, cfg.train.accumulate_steps), strict=False):
            for group in groups:
                group["lr"] = float(rate)
            buffer.write(step(batches))
            if is_over.is_set():
                break
        buffer.pull()
    finally:
        background.close()
        for split in parts.loaders:
            split.close()
    losses = np.concatenate(windows)
    return np.asarray(rates[: len(losses)]), losses


def _groups(parts: Parts) -> list[dict[str, Any]]:
    """Return the parameter groups whose rate is `optimizer.lr` before the schedule changes it."""
    groups = parts.optimizer.param_groups
    usual = float(parts.optimizer.defaults["lr"])
    return [group for group in groups if float(group.get("initial_lr", group["lr"])) == usual] or groups


def _batches(batches: Batches, size: int) -> Iterator[tuple[Any, ...]]:
    for epoch in count():
        iterator = iter(batches.epoch(epoch))
        while group := tuple(islice(iterator, size)):
            yield group


def _draw(found: RangeTest, path: Path, *, title: str) -> None:
    from matplotlib.figure import Figure  # heavy; pyplot would keep global state

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    axes.plot(found.rates, found.losses, color="#4878d0", alpha=0.3, linewidth=0.9, label="loss")
    axes.plot(found.rates, found.smoothed, color="#4878d0", linewidth=1.8, label="smoothed")
    for rate, color, name in (
        (found.steepest, "#6acc64", "falls fastest"),
        (found.tenth_of_lowest, "#ee854a", "a tenth of the lowest's"),
    ):
        taken = ", taken" if rate == found.suggested else ""
        axes.axvline(rate, color=color, linestyle="--", linewidth=1.3, label=f"{name}: {rate:.1e}{taken}")
    low = float(min(found.smoothed.min(), found.losses.min()))
    spread = max(float(found.smoothed[: max(3, len(found.smoothed) // 4)].max()) - low, 1e-12)
    axes.set(title=title, xlabel="learning rate", ylabel="training loss", xscale="log")
    axes.set_ylim(low - 0.15 * spread, low + 1.6 * spread)  # a diverged loss would flatten the rest
    axes.grid(alpha=0.25)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False)
    figure.savefig(path, dpi=120)

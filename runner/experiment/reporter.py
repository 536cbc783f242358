"""Records a run in its journal: its start, its values and its model. Values also go to the screen, and images to files.

session.py creates it. Points that can't be written yet wait here.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import threading
import time
import uuid
from collections.abc import Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from omegaconf import DictConfig, OmegaConf

from runner.config import defaults
from runner.config.identity import chosen, leaves
from runner.config.instantiate import PREPARED
from runner.config.run_files import write_whole
from runner.config.secrets import for_display
from runner.config.settings import Settings
from runner.device import Choice
from runner.device.placement import map_tensors
from runner.errors import without_password
from runner.experiment import provenance
from runner.experiment.console import Screen
from runner.experiment.context import Checked, RunContext
from runner.experiment.directory import BEST, CHECKPOINTS, DIFF, ENVIRONMENT, EXAMPLE, RERUN, Run
from runner.experiment.provenance import NOTE, described, user_tags
from runner.inspection import call_site
from runner.models.card import NAME as CARD
from runner.models.card import Card
from runner.models.example import call_of
from runner.tasks.metric_names import is_rate
from runner.tasks.task import is_predicting
from runner.tracking.journal import Journal, Points, UnsyncedError
from runner.tracking.journal_reader import read_measured, read_series
from runner.tracking.mlflow_model import leave_graph
from runner.tracking.publisher import Publisher
from runner.tracking.trackers import chosen_trackers
from runner.training import lora
from runner.training.checkpoint import read_kept
from runner.training.hooks import HookValues
from runner.training.metric_buffer import Window
from runner.training.observer import EpochEnd, Observer, Trial
from runner.training.parts import Parts
from runner.version import __version__

if TYPE_CHECKING:
    from PIL import Image

IMAGES, TABLES = "images", "tables"
NUM_EXAMPLE_ROWS = 4
SMALL = 256  # pixels of the image that MLflow's charts show


class Reporter(Observer):
    """The observer of a training: sends its values to the journal, the publisher and the screen, and keeps the last ones.

    All but means() runs in the background thread. What window() and values() take is in the journal after settle().
    """

    def __init__(
        self,
        folder: Path,
        journal: Journal,
        screen: Screen,
        *,
        publisher: Publisher | None = None,
        trial: Trial | None = None,
        batch_size: int = 1,
    ) -> None:
        """Read what the journal of a resumed run has, 1 s a million points: these points are not written twice."""
        self.folder, self.journal, self.trial = folder, journal, trial
        self._screen, self._publisher, self._batch_size = screen, publisher, batch_size
        starts = Run(folder).events("start")
        self.uid: str = starts[0]["uid"] if starts else uuid.uuid4().hex  # of the run, also when it is resumed
        self.metrics: dict[str, float] = {}  # the last value of each
        self.points = 0  # that the journal has
        self._last_steps: dict[str, int] = {}  # by name, the last step that the journal had at the start
        for name, (steps, _, values) in read_series(folder).items() if starts else ():
            self._last_steps[name], self.metrics[name] = int(steps.max()), float(values[-1])
            self.points += len(values) * _is_measured(name)
        self._sums: dict[str, float] = {}
        self._num_rows = 0
        self._lock = threading.Lock()  # of the sums: means() is called while windows still arrive
        self._waiting: list[Points] = []

    def log_start(
        self, cfg: DictConfig, parts: Parts, *, machine: Checked, context: RunContext, num_together: int = 1
    ) -> None:
        """Write what the run is, before its first step: configuration, tags, data set, code."""
        member, folder, journal = context.member, self.folder, self.journal
        git, name = provenance.git_state(), f"{model_name(cfg)} {parts.source.name} {machine.choice.device}"
        most = None if cfg.tracking.points == "all" else cfg.tracking.points
        journal.event(
            "start",
            uid=self.uid,
            experiment=cfg.tracking.experiment or parts.source.name,
            run_name=cfg.name or (member and member.name) or name,
            start_ms=int(time.time() * 1000),
            params=texts(defaults.main(chosen(cfg))) | parameters(cfg),
            tags=_tags(cfg, parts, folder, machine, context, git),
            system_metrics=cfg.tracking.system_metrics,
            trackers=chosen_trackers(cfg.tracking),
            points={"most": most, "expected": parts.limits.num_steps // cfg.metrics.every},
        )
        if member is not None:
            journal.event("parent", uid=member.uid, experiment=member.experiment)
        facts, sizes = OmegaConf.to_container(cfg.facts, resolve=True, throw_on_missing=False), dict(parts.splits.sizes)
        journal.event(
            "dataset",
            name=parts.source.name,
            digest=data_digest(parts),
            source=without_password(str(parts.source.origin)),
            source_type="local",
            schema=json.dumps({"facts": facts}),
            profile=json.dumps({"num_rows": sum(sizes.values()), **sizes}),
            context="training",
        )
        notes = {
            "machine": machine.hardware.in_words,
            "threads": str(torch.get_num_threads()),
            **({provenance.TOGETHER: f"{num_together} jobs"} if num_together > 1 else {}),
            **provenance.fingerprints(_own_files()),
        }
        files = {ENVIRONMENT: provenance.environment() + provenance.noted(notes)}
        if git is not None and git.diff and cfg.tracking.git_diff:
            files[DIFF] = provenance.diff_without_secrets(git.diff, str(cfg.tracking.uri))
        for file, text in files.items():
            (folder / file).write_text(text)
        for file in (RERUN, *files):
            journal.event("artifact", path=file, to="")

    def log_model(self, parts: Parts, settings: Settings, rows: Any, *, step: int) -> None:
        """Leave what the publisher makes MLflow's models from: of the best weights (of `step`), and of other kept checkpoints.

        rows: From example_rows(); a custom task's model may take other inputs.
        """
        folder, journal = self.folder, self.journal
        example = None if is_predicting(parts.task) else _called_with(parts)
        example = rows if example is None else example
        torch.save(map_tensors(example, lambda t: t.detach().cpu().clone()), folder / EXAMPLE)
        dataset = [parts.source.name, data_digest(parts)]
        event = model_event(folder, parts.card, EXAMPLE, step=step, dataset=dataset)
        event["params"] = texts(defaults.main(settings.experiment))
        others = {f"{CHECKPOINTS}/{other['file']}": other["step"] for other in read_kept(folder / CHECKPOINTS)}
        logged = {step, *(each.get("step") for each in Run(folder).events("model"))} if others else set()
        for weights, at in others.items():
            if at not in logged:  # before the run was resumed
                measured = read_measured(folder, at)
                metrics = {name: point for name, point in measured.items() if name.startswith("val/")}
                journal.event("model", **event | {"step": at, "weights": weights, "metrics": metrics, "kept": True})
        if settings.tracking.enabled:
            leave_graph(folder, event)
        journal.event("model", **event)  # last: of models of one name runs:/RUN/NAME is the newest

    def say(self, text: str) -> None:
        self._screen.say(text)

    def epoch(self, end: EpochEnd) -> None:
        self._screen.epoch(end)

    def progress(self, *, num_steps: int, num_epochs: int) -> AbstractContextManager[None]:
        return self._screen.training(num_steps=num_steps, num_epochs=num_epochs)

    def window(self, window: Window) -> None:
        """Record the training's rows since the last window."""
        self._add(window.names, window.steps, window.times_ms, window.values)
        rate, now_ms = window.num_steps / max(window.seconds, 1e-9), int(window.times_ms[-1])
        speed = {"speed/steps_per_second": rate, "speed/samples_per_second": rate * self._batch_size}
        self.values(speed, step=int(window.steps[-1]), time_ms=now_ms)
        for name, noted in window.notes.items():
            steps, values = np.array([step for step, _ in noted]), np.array([[value] for _, value in noted])
            self._add((name,), steps, np.full(len(noted), now_ms), values)
            self.metrics[name] = noted[-1][1]
        self.metrics |= dict(zip(window.names, map(float, window.values[-1]), strict=True))
        with self._lock:
            for name, total in zip(window.names, window.values.sum(0, dtype=np.float64), strict=True):
                self._sums[name] = self._sums.get(name, 0.0) + float(total)
            self._num_rows += len(window.values)
        self._screen.window(window)

    def values(self, values: Mapping[str, float], *, step: int, time_ms: int) -> None:
        """Record the values of a whole split, at `step`."""
        self.metrics |= values
        new = {name: value for name, value in values.items() if step > self._last_steps.get(name, -1)}
        if new:
            self._add(tuple(new), np.array([step]), np.array([time_ms]), np.array([list(new.values())]))

    def settle(self) -> None:
        """Write the waiting points to the disk.

        Raises:
            OSError: The points keep waiting, unless the journal contains them already (UnsyncedError).
        """
        if not self._waiting:
            return
        try:
            self.journal.blocks(self._waiting)
        except UnsyncedError:
            self._journaled()
            raise
        self._journaled()

    def _journaled(self) -> None:
        self.points += sum(len(block.steps) * sum(map(_is_measured, block.names)) for block in self._waiting)
        self._waiting = []
        if self._publisher is not None and (problem := self._publisher.first_failure()) is not None:
            self._screen.say(f"tracking: {problem}; the run continues, and its journal keeps everything")

    def means(self) -> dict[str, float]:
        """Return the means over the training's points since the last call."""
        with self._lock:
            means = {name: total / self._num_rows for name, total in self._sums.items()}
            self._sums, self._num_rows = {}, 0
        return means

    def shown(self, shown: HookValues, *, step: int, time_ms: int) -> None:
        """Write a hook's images and tables to files, and have them sent. Raises: OSError."""
        for name, image in shown.images.items():
            for file in _write_image(self.folder / IMAGES, name, image, step=step, time_ms=time_ms):
                self.journal.event("artifact", path=f"{IMAGES}/{file.name}", to=IMAGES)
        tags = {"mlflow.loggedImages": "True"} if shown.images else {}
        for name, rows in shown.tables.items():
            file = _add_rows(self.folder / TABLES / f"{name.replace('/', '~')}.json", rows, step=step)
            self.journal.event("artifact", path=f"{TABLES}/{file.name}", to=TABLES)
        if shown.tables:
            written = [f"{TABLES}/{file.name}" for file in sorted((self.folder / TABLES).glob("*.json"))]
            tags["mlflow.loggedArtifacts"] = json.dumps([{"path": path, "type": "table"} for path in written])
        if tags:
            self.journal.event("tags", tags=tags)

    def _add(self, names: tuple[str, ...], steps: NDArray[Any], times_ms: NDArray[Any], values: NDArray[Any]) -> None:
        new = steps > self._last_steps.get(names[0], -1)
        if new.any():
            self._waiting.append(Points(names, steps[new], times_ms[new], values[new].astype(np.float64)))


def _is_measured(name: str) -> bool:
    """Whether it is a result, and neither a speed nor a learning rate."""
    return not name.startswith("speed/") and not is_rate(name)


def _write_image(folder: Path, name: str, image: Image.Image, *, step: int, time_ms: int) -> list[Path]:
    folder.mkdir(parents=True, exist_ok=True)
    begin = f"{name.replace('/', '~')}+step+{step}+"
    before = next((file for file in sorted(folder.glob("*.png")) if file.name.startswith(begin)), None)
    unique = uuid.uuid5(uuid.NAMESPACE_URL, f"{folder.absolute()}/{begin}")
    path = before or folder / f"{begin}timestamp+{time_ms}+{unique}.png"
    small = image.copy()
    small.thumbnail((SMALL, SMALL))
    preview = path.with_name(f"{path.stem}+compressed.webp")
    image.save(path)
    small.save(preview)
    return [path, preview]


def _add_rows(path: Path, rows: list[dict[str, Any]], *, step: int) -> Path:
    """Write each row with its step, as pandas' orient="split"; rows of this step or later are replaced."""
    before: list[dict[str, Any]] = []
    if path.is_file():
        held = json.loads(path.read_text())
        before = [dict(zip(held["columns"], row, strict=True)) for row in held["data"]]
        before = [row for row in before if row["step"] < step]
    every = before + [{"step": step, **row} for row in rows]
    columns = list(dict.fromkeys(name for row in every for name in row))
    content = {"columns": columns, "data": [[row.get(name) for name in columns] for row in every]}
    write_whole(path, json.dumps(content))
    return path


def _tags(
    cfg: DictConfig, parts: Parts, folder: Path, machine: Checked, context: RunContext, git: provenance.Git | None
) -> dict[str, str]:
    choice, changed = machine.choice, defaults.in_words(defaults.changed(chosen(cfg)))
    member, repetition = context.member, context.repetition
    tags: dict[str, str | None] = {
        "device": choice.device,
        "device_name": machine.hardware.name_of(choice.here),
        "device_reason": choice.reason,
        "runner_version": __version__,
        "mlflow.user": _user(),
        "mlflow.source.name": "python -m runner",
        "mlflow.source.type": "LOCAL",
        NOTE: described(cfg, _note(cfg, parts, choice, folder, changed=changed)),
        "changed": changed,
        "sweep": member.sweep if member else None,
        "reproduces": repetition.of if repetition else None,
    }
    if git is not None:
        tags |= {"git_commit": git.commit, "git_dirty": str(git.dirty).lower(), "mlflow.source.git.commit": git.commit}
        tags |= {"mlflow.source.git.branch": git.branch, "mlflow.source.git.repoURL": provenance.remote()}
    return {name: value for name, value in tags.items() if value} | user_tags(cfg)


def data_digest(parts: Parts) -> str:
    """Return the data's fingerprint, cut to the length that MLflow accepts."""
    return parts.splits.fingerprint[:32]


def example_rows(parts: Parts) -> Any:
    """Return a few examples of the batches' inputs, on the device."""
    _, few = _example_batches(parts)
    return few[0] if isinstance(few, tuple | list) else few


def _example_batches(parts: Parts) -> tuple[Any, Any]:
    batch = next(iter((parts.val or parts.train).epoch(0)))
    return batch, map_tensors(batch, lambda each: (each[:NUM_EXAMPLE_ROWS] if each.dim() else each).detach())


def _called_with(parts: Parts) -> Any:
    """Return what a custom task calls the model with, for a few examples or else a whole batch; None if that fails."""
    model, (batch, few) = parts.kept_model.eval(), _example_batches(parts)
    example = call_of(model, lambda: parts.task(model, few))
    return example if example is not None else call_of(model, lambda: parts.task(model, batch))


def model_event(folder: Path, card: Card, example: str, *, step: int, dataset: list[str] | None) -> dict[str, Any]:
    """Return the journal's event for the run's model, from which tracking.mlflow_model packages it.

    Reads the whole journal: 0.1 s per million points.

    Args:
        folder: The run directory.
        card: The model's card.
        example: The file with example inputs, relative to the directory.
        step: The step of its weights.
        dataset: Name and digest (None: unknown).
    """
    node = card.model
    while node.get("_target_") in (PREPARED, lora.NODE):
        node = node["model"]
    return {
        "name": f"{str(node.get('_target_')).rsplit('.', 1)[-1].lower()}-{card.data}",
        "node": card.model,
        "weights": BEST,
        "example": example,
        "card": CARD,
        "step": step,
        "metrics": read_measured(folder, step),
        "dataset": dataset,
    }


def parameters(cfg: DictConfig) -> dict[str, str]:
    """Return the resolved configuration by dotted key, without passwords and values from the environment."""
    shown = {key: node for key, node in for_display(cfg).items() if key not in ("hydra", "sweep", "plan")}
    return texts(dict(leaves(shown)))


def texts(values: Mapping[str, Any]) -> dict[str, str]:
    return {key: str(value) if value is not None else "null" for key, value in values.items()}


def model_name(cfg: DictConfig) -> str:
    return str(cfg.model.get("_target_", "model")).rsplit(".", 1)[-1]


def _note(cfg: DictConfig, parts: Parts, choice: Choice, folder: Path, *, changed: str) -> str:
    sizes = ", ".join(f"{count:,} {name}" for name, count in parts.splits.sizes.items())
    return (
        f"**{model_name(cfg)}** ({parts.num_parameters:,} parameters) on **{parts.source.name}** ({sizes} rows), "
        f"on **{choice.device}**: {choice.reason}.\n\n"
        f"Changed: {f'`{changed}`' if changed else 'nothing'}. The whole configuration: rerun.yaml, an artifact.\n\n"
        f"Again: `python -m runner -cd {shlex.quote(str(folder))} -cn rerun`, or with rerun.yaml from this run's artifacts."
    )


def _own_files() -> list[str]:
    here = f"{str(Path.cwd()).rstrip(os.sep)}{os.sep}"
    files = {str(getattr(module, "__file__", None)) for module in list(sys.modules.values())}
    below = {file for file in files if file.startswith(here) and call_site.is_own(file)}
    return sorted(Path(file).relative_to(here).as_posix() for file in below)


def _user() -> str:
    try:
        return getpass.getuser()
    except (OSError, KeyError):  # a container's user without a name
        return "unknown"

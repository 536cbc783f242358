"""Records a run: its start and its model in the journal, which MLflow's page is made from.

Called by session.py.
"""

from __future__ import annotations

import getpass
import json
import os
import shlex
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf

from runner.config import defaults
from runner.config.identity import chosen, leaves
from runner.config.instantiate import PREPARED
from runner.config.secrets import for_display
from runner.config.settings import Settings
from runner.device import Choice
from runner.device.placement import map_tensors
from runner.errors import without_password
from runner.experiment import provenance
from runner.experiment.context import Checked, RunContext
from runner.experiment.provenance import NOTE, described, user_tags
from runner.experiment.reporter import Reporter
from runner.inspection import call_site
from runner.models.card import NAME as CARD
from runner.models.card import Card
from runner.models.example import call_of
from runner.tasks.task import is_predicting
from runner.tracking.journal_reader import read_events, read_measured
from runner.tracking.mlflow_model import BEST, leave_graph
from runner.training.checkpoint import read_kept
from runner.training.parts import Parts
from runner.version import __version__

EXAMPLE = "journal/example.pt"
NUM_EXAMPLE_ROWS = 4


def log_start(
    reporter: Reporter,
    cfg: DictConfig,
    parts: Parts,
    *,
    machine: Checked,
    context: RunContext,
    num_together: int = 1,
) -> None:
    """Write what the run is, before its first step: configuration, tags, data set, code."""
    member, folder, journal = context.member, reporter.folder, reporter.journal
    git, name = provenance.git_state(), f"{model_name(cfg)} {parts.source.name} {machine.choice.device}"
    most = None if cfg.tracking.points == "all" else cfg.tracking.points
    journal.event(
        "start",
        uid=reporter.uid,
        experiment=cfg.tracking.experiment or parts.source.name,
        run_name=cfg.name or (member and member.name) or name,
        start_ms=int(time.time() * 1000),
        params=texts(defaults.main(chosen(cfg))) | parameters(cfg),
        tags=_tags(cfg, parts, folder, machine, context, git),
        system_metrics=cfg.tracking.system_metrics,
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
    files = {"environment.txt": provenance.environment() + provenance.noted(notes)}
    if git is not None and git.diff and cfg.tracking.git_diff:
        files["git.diff"] = provenance.diff_without_secrets(git.diff, str(cfg.tracking.uri))
    for file, text in files.items():
        (folder / file).write_text(text)
    for file in ("rerun.yaml", *files):
        journal.event("artifact", path=file, to="")


def _tags(
    cfg: DictConfig, parts: Parts, folder: Path, machine: Checked, context: RunContext, git: provenance.Git | None
) -> dict[str, str]:
    choice, changed = machine.choice, defaults.in_words(defaults.changed(chosen(cfg)))
    tags = {
        "device": choice.device,
        "device_name": machine.hardware.name_of(choice.here),
        "device_reason": choice.reason,
        "runner_version": __version__,
        "mlflow.user": _user(),
        "mlflow.source.name": "python -m runner",
        "mlflow.source.type": "LOCAL",
        NOTE: described(cfg, _note(cfg, parts, choice, folder, changed=changed)),
    }
    source: dict[str, str | None] = {}
    if git is not None:
        tags |= {"git_commit": git.commit, "git_dirty": str(git.dirty).lower(), "mlflow.source.git.commit": git.commit}
        source = {"mlflow.source.git.branch": git.branch, "mlflow.source.git.repoURL": provenance.remote()}
    member, repetition = context.member, context.repetition
    more = source | {
        "changed": changed,
        "sweep": member and member.sweep,
        "reproduces": repetition and repetition.of,
    }
    return tags | {name: value for name, value in more.items() if value} | user_tags(cfg)


def data_digest(parts: Parts) -> str:
    """The data's fingerprint, as far as MLflow takes one."""
    return parts.splits.fingerprint[:32]


def example_rows(parts: Parts) -> Any:
    """Return a few examples of the batches' inputs, on the device."""
    batch = _example_batch(parts)
    inputs = batch[0] if isinstance(batch, tuple | list) else batch
    return map_tensors(inputs, _few)


def _example_batch(parts: Parts) -> Any:
    return next(iter((parts.val or parts.train).epoch(0)))


def _few(tensor: torch.Tensor) -> torch.Tensor:
    return (tensor[:NUM_EXAMPLE_ROWS] if tensor.dim() else tensor).detach()


def _called_with(parts: Parts) -> Any:
    """Return what a custom task calls the model with, for a few examples or else a whole batch; None if that fails."""
    model, batch = parts.kept_model.eval(), _example_batch(parts)
    few = map_tensors(batch, _few)
    example = call_of(model, lambda: parts.task(model, few))
    return example if example is not None else call_of(model, lambda: parts.task(model, batch))


def log_model(reporter: Reporter, parts: Parts, settings: Settings, rows: Any, *, step: int) -> None:
    """Leave what the publisher makes MLflow's models from: of the best weights (of `step`), and of other kept checkpoints.

    rows: From example_rows(); a custom task's model may take other inputs.
    """
    folder, journal = reporter.folder, reporter.journal
    example = None if is_predicting(parts.task) else _called_with(parts)
    example = rows if example is None else example
    torch.save(map_tensors(example, lambda t: t.detach().cpu().clone()), folder / EXAMPLE)
    dataset = [parts.source.name, data_digest(parts)]
    event = model_event(folder, parts.card, EXAMPLE, step=step, dataset=dataset)
    event["params"] = texts(defaults.main(settings.experiment))
    others = {f"checkpoints/{other['file']}": other["step"] for other in read_kept(folder / "checkpoints")}
    logged = (
        {step, *(each.get("step") for each in read_events(folder) if each["kind"] == "model")} if others else {step}
    )
    for weights, at in others.items():
        if at not in logged:  # before the run was resumed
            measured = read_measured(folder, at)
            metrics = {name: point for name, point in measured.items() if name.startswith("val/")}
            journal.event("model", **event | {"step": at, "weights": weights, "metrics": metrics, "kept": True})
    if settings.tracking.enabled:
        leave_graph(folder, event)
    journal.event("model", **event)  # last: of models of one name runs:/RUN/NAME is the newest


def model_event(folder: Path, card: Card, example: str, *, step: int, dataset: list[str] | None) -> dict[str, Any]:
    """What the journal says of the run's model, see tracking.mlflow_model. example: the file with rows to try it with.

    dataset: name and digest (None: not known). Reads the journal whole, 0.1 s a million points.
    """
    node = card.model["model"] if card.model.get("_target_") == PREPARED else card.model
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

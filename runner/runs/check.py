"""Runs `train.check=true`: two steps, one batch of each split, a checkpoint and the export, in a directory that the caller removes."""

from __future__ import annotations

import os
import pickle
import tempfile
import time
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path

import torch
from omegaconf import DictConfig

from runner.device.host_memory import size_in_words
from runner.device.placement import tensors
from runner.errors import RunnerError
from runner.experiment.context import RunContext
from runner.experiment.directory import BEST, LAST, LOG, Run
from runner.experiment.run import run
from runner.experiment.summary import Summary
from runner.experiment.terminal import say
from runner.experiment.terminal import seconds as in_seconds
from runner.models.example import call
from runner.runs.export import FOLDER, FORMS, export_to
from runner.runs.inputs import example
from runner.runs.load import Trained, open_on_cpu
from runner.training import checkpoint
from runner.version import IMPORTED


def check_run(cfg: DictConfig, folder: Path, *, context: RunContext) -> Summary:
    """Train two steps, load the model again and export it; print a line for each part that works.

    Returns:
        The summary of the two steps.

    Raises:
        RunnerError: as experiment.run, and for a model that can't be loaded again or exported.
    """
    cfg.tracking.enabled, cfg.tracking.log_model = False, True  # it leaves a few rows to export by
    summary = run(cfg, folder, context=context)
    if summary.status != "finished":
        _keep_log(folder)
        return summary
    began = time.perf_counter()
    trained = open_on_cpu(Run(folder))
    loading_seconds = time.perf_counter() - began
    for line in _trained_parts(cfg, summary, trained):
        say(f"check:  {line}")
    _check_weights(trained)
    say(f"check:  model: loaded again from its run ({loading_seconds:.2f} s)")
    _export(trained)
    say(f"check: everything works ({time.perf_counter() - IMPORTED:.1f} s)")
    return summary


def _trained_parts(cfg: DictConfig, summary: Summary, trained: Trained) -> Iterator[str]:
    seconds: Mapping[str, float] = summary.time
    yield _steps(cfg, summary, num_steps=trained.card.facts["num_steps"])
    for split, name in (("val", "validation"), ("test", "test")):
        values = {key: value for key, value in summary.metrics.items() if key.startswith(f"{split}/")}
        if values:
            text = ", ".join(f"{key.partition('/')[2]} {value:.4g}" for key, value in values.items())
            yield f"a batch of {split}: {text} ({seconds.get(name, 0.0):.2f} s)"
    if cfg.train.hooks:
        yield f"hooks ({seconds.get('hooks', 0.0):.2f} s)"
    size = size_in_words((trained.folder / LAST).stat().st_size)
    yield f"checkpoint of {size}: written, read, put back ({seconds.get('checkpoints', 0.0):.2f} s)"
    plots = sorted(path.name for path in (trained.folder / "plots").glob("*"))
    if plots:
        yield f"plots: {', '.join(plots)} ({seconds.get('finish', 0.0):.2f} s)"


def _steps(cfg: DictConfig, summary: Summary, *, num_steps: int) -> str:
    taken, step = summary.num_steps, summary.step
    text = f"{taken} optimizer {'step' if taken == 1 else 'steps'} ({summary.seconds['train']:.2f} s)"
    if cfg.train.compile or cfg.train.cuda_graph or not step:  # the second step compiles, too
        return text
    return f"{text}; all {num_steps:,} take about {in_seconds(num_steps * step['seconds'])} at the pace of the second"


def _check_weights(trained: Trained) -> None:
    saved, loaded = checkpoint.load(trained.folder / BEST)["model"], trained.model.state_dict()
    for name, value in saved.items():
        if not torch.equal(value.nan_to_num(), loaded[name].to(value.dtype).nan_to_num()):
            problem = f"the model's `{name}` differs from the checkpoint's after loading"
            fix = "make `load_state_dict()` restore everything that `state_dict()` returns"
            raise RunnerError.of("train.check=true", problem, fix)


def _export(trained: Trained) -> None:
    _repeat(trained)
    if find_spec("safetensors") is not None:
        _export_as("safetensors", trained)
    try:
        _export_as("pt2", trained)
    except RunnerError as error:  # MLflow's model is a pickle then
        pickled = _pickled(trained)
        say(f"check:  export as pickle of {size_in_words(pickled)}, as for a graph {error.problems[0].message}")


@torch.no_grad()
def _repeat(trained: Trained) -> None:
    """Raises: RunnerError for a model whose outputs for the same rows differ in eval mode."""
    rows, model = example(trained), trained.model
    pairs = zip(tensors(call(model, rows)), tensors(call(model, rows)), strict=True)
    differences = [float((one.double() - other.double()).abs().max()) for one, other in pairs if one.numel()]
    if (most := max(differences, default=0.0)) > 0:
        problem = f"two passes over one batch differ by up to {most:.3g} in eval mode: `forward` draws random numbers"
        fix = "create layers in `__init__`, and use `F.dropout(x, training=self.training)`"
        raise RunnerError.of("train.check=true", problem, fix)


def _export_as(form: str, trained: Trained) -> None:
    began, target = time.perf_counter(), trained.folder / FOLDER / FORMS[form][0]
    report = export_to(trained, form, target, predictions=False)
    difference = (report["checked"] or {}).get("largest_difference", 0.0)
    say(f"check:  export as {form}: largest difference {difference:.0e} ({time.perf_counter() - began:.2f} s)")


def _pickled(trained: Trained) -> int:
    try:
        return len(pickle.dumps(trained.model))
    except Exception as error:
        problem = f"the model can't be exported as a graph or pickled: {type(error).__name__}: {error}"
        fix = "use a model of modules and tensors only, or `tracking.log_model=false`"
        raise RunnerError.of("tracking.log_model=true", problem, fix) from error


def _keep_log(folder: Path) -> None:
    log = folder / LOG
    text = log.read_text(encoding="utf-8") if log.is_file() else ""
    if "Traceback" not in text:
        return
    number, name = tempfile.mkstemp(prefix="runner-", suffix=".log")
    with os.fdopen(number, "w", encoding="utf-8") as file:
        file.write(text)
    say(f"log     {name}")

"""`predict`: apply a run's best weights to each row of a file, and write the predictions to another file.

It reads a chunk at a time, and copies a batch's predictions from the device while the next batch is computed.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from runner.command import Arguments
from runner.config import validate
from runner.config.identity import key_of
from runner.device import backends, layers
from runner.device.placement import map_tensors, move
from runner.device.precision import at_least_float32
from runner.errors import at_once, refuse
from runner.experiment.terminal import say, short
from runner.models.card import Card
from runner.runs.find import find_trained
from runner.runs.inputs import chunks, existing, files_of, pieces
from runner.runs.load import Trained, computing, configuration_of, open_run
from runner.runs.output_files import check_output, write_file
from runner.tasks.task import Task, is_predicting

Columns = dict[str, Any]  # NumPy arrays of as many rows, by name


def predictions(trained: Trained, batch: Any) -> Any:
    """Return the task's predictions for a batch, else the raw outputs, on the device. Does not wait for the device."""
    with torch.inference_mode(), trained.precision.autocast():
        task = trained.task
        if is_predicting(task):
            return task.predictions(task.outputs(trained.model, (batch, None)))
        return map_tensors(
            trained.model(batch), lambda tensor: at_least_float32(tensor) if tensor.is_floating_point() else tensor
        )


def columns(found: Any, task: Task, card: Card) -> Columns:
    """Return predictions on the host as columns. An array with more than two dimensions stays one array.

    multiclass: label, probability, p_CLASS; multilabel: p_LABEL; regression: the targets by name; else the raw outputs.
    """
    kind = task.kind if is_predicting(task) else ""
    if not isinstance(found, Tensor):
        named = found.items() if isinstance(found, Mapping) else enumerate(found)
        return {
            name: values for key, part in named for name, values in _numbered(part.numpy(), f"output_{key}", ()).items()
        }
    values = found.numpy()
    if values.ndim == 1:
        values = values[:, None]
    if kind == "multiclass" and values.ndim == 2:
        return _classes(values, card)
    if kind == "multilabel" and values.ndim == 2:
        names = card.targets or card.classes or tuple(map(str, range(values.shape[1])))
        return {f"p_{name}": values[:, number] for number, name in enumerate(names)}
    return _numbered(values, "prediction" if kind else "output", card.targets if kind == "regression" else ())


def _classes(values: Any, card: Card) -> Columns:  # (n, C)
    names = np.array(card.classes or tuple(map(str, range(values.shape[1]))))
    best = values.argmax(1)
    found = {"label": names[best], "probability": values[np.arange(len(values)), best]}
    return found | {f"p_{name}": values[:, number] for number, name in enumerate(names)}


def _numbered(values: Any, called: str, names: tuple[str, ...]) -> Columns:
    if values.ndim != 2:
        return {called: values}
    width = values.shape[1]
    if len(names) != width:
        names = (called,) if width == 1 else tuple(f"{called}_{number}" for number in range(width))
    return {name: values[:, number] for number, name in enumerate(names)}


def predict(arguments: Arguments) -> dict[str, Any]:
    """Write the predictions; for images, each with its file. Memory holds a chunk and a batch; for .npz, all predictions.

    Returns:
        The path, the number of rows, seconds, device, and counts of unknown and missing values.

    Raises:
        RunnerError: For a run without a model, or files that can't be read or written.
    """
    wanted, overrides = arguments.run, arguments.overrides
    inputs, output = arguments["--input"], arguments["--output"]
    file, target, run, (device, precision) = at_once(
        partial(existing, inputs),
        partial(check_output, output, inputs=Path(inputs).expanduser()),
        partial(find_trained, wanted, verb="predict"),
        partial(computing, overrides),
    )
    settings = _backends(run.folder, overrides)
    trained = open_run(run, device=device, precision=precision)
    switches, name = settings.get(trained.device.type, {}), trained.precision.name
    layers.lay_out(trained.model, device=trained.device, precision=name, settings=switches)
    switches = {key: value for key, value in switches.items() if key not in layers.LAYOUT_SETTINGS}
    backends.set_switches(trained.device, precision=name, deterministic=False, **switches)
    say(f"run     {trained.title}")
    say(f"device  {trained.choice.device} ({trained.choice.reason}), {name}")
    for note in trained.notes:
        say(f"note    {note}")
    began = time.perf_counter()
    counts: dict[str, dict[str, int]] = {}
    found = predicted_columns(trained, chunks(trained, file, counts), arguments["--batch-size"])
    if (files := files_of(trained, file)) is not None:
        found = _with_files(found, files)
    count = write_file(target, found)
    seconds = time.perf_counter() - began
    say(f"written {count:,} rows to {short(target.absolute())} in {seconds:.1f} s: {count / seconds:,.0f} rows/s")
    return {"path": str(target), "num_rows": count, "seconds": seconds, "device": trained.choice.device, **counts}


def _backends(folder: Path, overrides: Sequence[str]) -> dict[str, dict[str, Any]]:
    words = [word for word in overrides if key_of(word).startswith("backends.")]
    if not words:
        return {}  # `predict` also works for a run whose configuration no longer composes
    cfg = configuration_of(folder, words)
    refuse([problem for problem in validate.problems(cfg) if problem.source.startswith("backends.")])
    return {str(kind): {str(name): value for name, value in found.items()} for kind, found in cfg.backends.items()}


def predicted_columns(trained: Trained, found: Iterable[Any], batch_size: int) -> Iterator[Columns]:
    """Yield the columns of each batch. It is copied from the device while the next batch is computed."""
    waiting: Any = None
    for chunk in found:
        for batch in pieces(chunk, batch_size):
            computed = predictions(trained, move(batch, trained.device))
            if waiting is not None:
                yield _on_the_host(trained, waiting)
            waiting = computed
    if waiting is not None:
        yield _on_the_host(trained, waiting)


def _with_files(found: Iterable[Columns], files: Sequence[str]) -> Iterator[Columns]:
    """Put the file of each image in front of its predictions."""
    count = 0
    for answers in found:
        num_rows = len(next(iter(answers.values())))
        yield {"file": np.array(files[count : count + num_rows]), **answers}
        count += num_rows


def _on_the_host(trained: Trained, said: Any) -> Columns:
    return columns(map_tensors(said, lambda tensor: tensor.to("cpu")), trained.task, trained.card)

"""`export`: write a run's model in a format, and compare it with the original. FORMS lists the formats."""

from __future__ import annotations

import copy
import json
import shutil
import tempfile
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from runner.command import Arguments
from runner.config.packages import install
from runner.data.tables.encoder import columns_in
from runner.device.placement import map_tensors, num_rows, tensors
from runner.errors import RunnerError, at_once, nearest
from runner.experiment.provenance import versions
from runner.experiment.terminal import say, short
from runner.models.example import call, ordered
from runner.runs import export_formats
from runner.runs.export_formats import Compute
from runner.runs.find import find_trained
from runner.runs.inputs import example as example_of
from runner.runs.load import Trained, open_on_cpu
from runner.tasks.task import Predicting, is_predicting
from runner.training.lora import adapted, merge, merged_node

FOLDER = "exports"
ABOUT = "about.json"  # in a model's directory; FILE.json next to a file
TRIED_ROWS = (1, 2, 3, 7, 16)
#: relative and absolute tolerance in float32: another runtime sums in another order
CLOSE = {"rtol": 1e-4, "atol": 1e-5}


Write = Callable[[Trained, nn.Module, Any, Path], Compute | None]
FORMS: dict[str, tuple[str, Write]] = {
    "safetensors": ("model.safetensors", export_formats.safetensors),
    "onnx": ("model.onnx", export_formats.onnx),
    "pt2": ("model.pt2", export_formats.pt2),
    "mlflow": ("mlflow", export_formats.mlflow),
}
HOW = {
    "safetensors": "build the module that `model` describes, load_state_dict(safetensors.torch.load_file(FILE)), eval()",
    "onnx": "onnxruntime.InferenceSession(FILE).run(None, {NAME: array for each input})",
    "pt2": "torch.export.load(FILE).module()(*inputs)",
    "mlflow": "mlflow.pyfunc.load_model(FOLDER).predict(inputs), or mlflow models serve -m FOLDER --env-manager local",
}
#: help for a model that a format does not support
INSTEAD = {
    "safetensors": "use `--format mlflow`, which pickles what has no other form",
    "onnx": "use `--format pt2` for torch, `--format safetensors` for the weights, or `--format mlflow`, which pickles",
    "pt2": "use `--format safetensors` for the weights, or `--format mlflow`, which pickles",
    "mlflow": "use `--format safetensors` for the weights",
}
COLUMNS_NOTE = (
    ", where this runner is installed, from its checkout or its wheel; inputs: a DataFrame with these columns"
)
MEANINGS = {
    "multiclass": "logits by class, in the order of `classes`; softmax over the last axis makes probabilities",
    "multilabel": "logits by label, in the order of `targets`; the logistic function makes probabilities",
    "regression": "the numbers themselves, in the order of `targets`",
}


class WithPredictions(nn.Module):
    """A model that returns its task's predictions, e.g., probabilities instead of logits."""

    def __init__(self, model: nn.Module, task: Predicting) -> None:
        super().__init__()
        self.model, self.task = model, task

    def forward(self, inputs: Any) -> Any:
        return self.task.predictions(self.task.outputs(self.model, (inputs, None)))


def export(arguments: Arguments) -> dict[str, Any]:
    """Write the model, by default in exports/ of the run directory, and FILE.json next to it. Takes some seconds.

    Returns:
        The content of FILE.json, and the path.

    Raises:
        RunnerError: If the format does not support the model. Nothing is left then.
    """
    form, output = arguments["--format"], arguments["--output"]
    file, run = at_once(partial(_target, form, output), partial(find_trained, arguments.run, verb="export"))
    trained, target = open_on_cpu(run), file or run.folder / FOLDER / FORMS[form][0]
    report = export_to(trained, form, target, predictions=arguments["--predictions"])
    say(f"run     {trained.title}")
    for note in trained.notes:
        say(f"note    {note}")
    checked = report["checked"]
    if checked is None:
        say(f"checked not: onnxruntime is not installed; to install it: {install('onnx')}")
    else:
        rows = ", ".join(map(str, checked["rows"]))
        say(f"checked as the original for {rows} rows; largest difference {checked['largest_difference']:.1e}")
    say(f"written {short(target.absolute())} and {short(_about_file(target).absolute())}")
    return {**report, "path": str(target)}


def _merged(trained: Trained) -> Trained:
    if not any(adapted(trained.model)):
        return trained
    card = replace(trained.card, model=merged_node(trained.card.model))
    return replace(trained, model=merge(copy.deepcopy(trained.model)), card=card)


def export_to(trained: Trained, form: str, target: Path, *, predictions: bool) -> dict[str, Any]:
    """Write, check, then rename; return the description next to the model. Raises: RunnerError.

    LoRA's matrices are merged into the weights; the result is checked against the model as it was trained.
    """
    original: nn.Module = trained.model
    trained = _merged(trained)
    module: nn.Module = trained.model
    if predictions:
        if not is_predicting(trained.task) or form == "safetensors":
            why = "weights contain no computation" if form == "safetensors" else "the run's task defines no predictions"
            raise RunnerError.of("--predictions", why, "remove `--predictions`")
        original, module = (WithPredictions(each, trained.task).eval() for each in (original, module))
    rows = example_of(trained)
    if num_rows(rows) == 1:  # an export takes a dimension of 1 for a constant
        rows = map_tensors(rows, lambda tensor: torch.cat([tensor, tensor]))
    asked, fix = f"export --format {form}", INSTEAD[form]
    with _directory_near(target) as place:
        made = Path(place) / target.name
        rows = _ordered(module, rows, asked)
        with export_formats.explained(asked, fix):
            compute = FORMS[form][1](trained, module, rows, made)
            checked = None if compute is None else _checked(original, compute, rows, asked=asked, fix=fix)
            report = _about(trained, form, module, rows, checked, predictions=predictions)
        _about_file(made).write_text(json.dumps(report, indent=2) + "\n")
        if target.is_dir():
            shutil.rmtree(target)  # an earlier export, see _target()
        for file in sorted(Path(place).iterdir()):  # onnx may have a separate file of weights
            file.replace(target.parent / file.name)
    return report


def _about(
    trained: Trained, form: str, module: nn.Module, rows: Any, checked: dict[str, Any] | None, *, predictions: bool
) -> dict[str, Any]:
    """Return the description next to the model. checked: the comparison with the original; None: not possible."""
    card = trained.card
    kind = trained.task.kind if is_predicting(trained.task) else None
    meaning = MEANINGS.get(kind or "", "the model's raw outputs")
    if predictions:
        meaning = "what the task predicts"
        if kind == "multiclass":
            meaning = "probabilities by class, in the order of `classes`"
    how, inputs = HOW[form], _described(export_formats.input_names(module, rows), rows)
    if form == "mlflow" and (table := columns_in(card.reader)) is not None:
        how += COLUMNS_NOTE
        inputs = [{"name": column.name, "shape": ["rows"], "dtype": column.kind} for column in table.columns]
    with torch.no_grad():
        outputs = call(module, rows)
    return {
        "format": form,
        "how": how,
        "inputs": inputs,
        "outputs": _described(export_formats.output_names(outputs), outputs),
        "kind": kind,
        "meaning": meaning,
        "classes": list(card.classes),
        "targets": list(card.targets),
        "preprocessing": {
            "in_the_model": {key: card.model[key] for key in ("before", "after") if key in card.model},
            "before_it": card.reader,
        },
        "model": card.model,
        "data": card.data,
        "facts": card.facts,
        "run": trained.folder.name,
        "step": trained.step,
        "checked": checked,
        "versions": versions(),
        "card": asdict(card),
    }


def _described(names: list[str], tree: Any) -> list[dict[str, Any]]:
    return [
        {"name": name, "shape": ["rows", *tensor.shape[1:]], "dtype": str(tensor.dtype).removeprefix("torch.")}
        for name, tensor in zip(names, tensors(tree), strict=True)
    ]


def _ordered(module: nn.Module, rows: Any, asked: str) -> Any:
    try:
        return ordered(module, rows)
    except TypeError as error:
        problem = f"`forward` of {type(module).__name__} takes other inputs than the run's example of them: {error}"
        fix = "train with `tracking.log_model=true`, which keeps what the task gives the model"
        raise RunnerError.of(asked, problem, fix) from None


def _directory_near(target: Path) -> tempfile.TemporaryDirectory[str]:
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        return tempfile.TemporaryDirectory(dir=target.parent, prefix=".export-")
    except OSError as error:
        problem = f"can't write in `{short(target.parent.absolute())}`: {error.strerror}"
        fix = f"use `--output {target.name}`, or a path where you can write"
        raise RunnerError.of(f"--output {target}", problem, fix) from None


def _target(form: str, output: str | None) -> Path | None:
    """Return the file to write. Raises: RunnerError for an unknown format, or a path that the export can't have."""
    if form not in FORMS:
        problem = f"the format `{form}` is not one of {', '.join(FORMS)}"
        hits = nearest(form, FORMS) or list(FORMS)
        if form in ("torchscript", "jit", "pt"):
            problem, hits = f"{problem}; `pt2` replaces TorchScript", ["pt2"]
        raise RunnerError.suggest(f"export --format {form}", problem, (f"--format {hit}" for hit in hits))
    if output is None:
        return None
    path, name = Path(output).expanduser(), FORMS[form][0]
    if form != "mlflow":
        if path.is_dir():
            return path / name
        file = path.with_suffix(Path(name).suffix)
        if path != file:
            problem = f"a model in the format `{form}` ends in `{file.suffix}`"
            raise RunnerError.suggest(f"--output {output}", problem, [f"--output {file}"])
    # a user's directory may have one of the two files
    elif path.exists() and not all((path / each).is_file() for each in (ABOUT, "MLmodel")):
        problem = f"`{path}` exists and is not an exported model"
        ways = [f"--output {path / 'model'}"] * path.is_dir()
        raise RunnerError.suggest(f"--output {output}", problem, ways, "use another path")
    return path


def _about_file(target: Path) -> Path:
    return target / ABOUT if target.is_dir() or not target.suffix else target.with_name(f"{target.name}.json")


def _checked(module: nn.Module, compute: Compute, rows: Any, *, asked: str, fix: str) -> dict[str, Any]:
    largest = 0.0
    for count in TRIED_ROWS:
        some = map_tensors(rows, lambda tensor, count=count: torch.cat([tensor] * count)[:count])  # type: ignore[misc]
        with torch.no_grad():
            wanted, computed = tensors(call(module, some)), tensors(compute(some))
        shapes, others = ([tuple(part.shape) for part in parts] for parts in (wanted, computed))
        if shapes != others:
            raise RunnerError.of(
                asked, f"for {count} rows the outputs have the shape {others} instead of {shapes}", fix
            )
        for number, (one, other) in enumerate(zip(wanted, computed, strict=True)):
            difference = (one.double() - other.double()).abs()
            if not torch.allclose(other.double(), one.double(), equal_nan=True, **CLOSE):
                most = float(difference.nan_to_num(torch.inf).max())
                problem = f"for {count} rows output {number} differs from the original's by up to {most:.3g}"
                raise RunnerError.of(asked, problem, fix)
            largest = max(largest, float(difference.nan_to_num(0.0).max()) if difference.numel() else 0.0)
    return {"rows": list(TRIED_ROWS), "largest_difference": largest}

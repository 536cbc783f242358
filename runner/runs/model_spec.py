"""Tells as plain values all that somebody without this package needs to use an exported module. For export.py."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from torch import nn

from runner.data.tables.encoder import Columns
from runner.data.tables.node import columns_in
from runner.device.placement import tensors
from runner.experiment.provenance import versions
from runner.runs import export_formats
from runner.runs.load import Trained
from runner.tasks.task import is_predicting

HOW = {
    "safetensors": "build the module that `model` describes, load_state_dict(safetensors.torch.load_file(FILE)), eval()",
    "onnx": "onnxruntime.InferenceSession(FILE).run(None, {NAME: array for each input})",
    "pt2": "torch.export.load(FILE).module()(inputs)",
    "mlflow": "mlflow.pyfunc.load_model(FOLDER).predict(inputs), or mlflow models serve -m FOLDER --env-manager local",
}
OF_COLUMNS = f"{HOW['mlflow']}, where this runner is installed, from its checkout or its wheel; inputs: a DataFrame with these columns"


def about(
    trained: Trained, form: str, module: nn.Module, rows: Any, checked: dict[str, Any] | None, *, predictions: bool
) -> dict[str, Any]:
    """What stands beside the model. checked: what the comparison with the original found; None: it could not be made."""
    card = trained.card
    with torch.no_grad():
        said = module(rows)
    kind = trained.task.kind if is_predicting(trained.task) else None
    names = export_formats.output_names(module, rows)
    columns = columns_in(card.reader) if form == "mlflow" else None
    return {
        "format": form,
        "how": HOW[form] if columns is None else OF_COLUMNS,
        "inputs": _described(export_formats.input_names(rows), rows) if columns is None else _named(columns),
        "outputs": _described(names, said),
        "kind": kind,
        "meaning": _meaning(kind, predictions=predictions),
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


def _named(columns: Columns) -> list[dict[str, Any]]:
    return [{"name": column.name, "shape": ["rows"], "dtype": column.kind} for column in columns.columns]


def _meaning(kind: str | None, *, predictions: bool) -> str:
    if predictions:
        return "probabilities by class, in the order of `classes`" if kind == "multiclass" else "what the task predicts"
    meanings = {
        "multiclass": "logits by class, in the order of `classes`; softmax over the last axis makes probabilities",
        "multilabel": "logits by label, in the order of `targets`; the logistic function makes probabilities",
        "regression": "the numbers themselves, in the order of `targets`",
    }
    return meanings.get(kind or "", "the model's raw outputs")

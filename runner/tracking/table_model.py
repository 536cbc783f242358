"""MLflow's model of a table, which takes DataFrames by their columns' names: in whatever process loads it.

MLflow calls _load_pyfunc() of this module where such a model is loaded as a pyfunc: this package must be installed there.
mlflow.pytorch.load_model() needs torch alone and gives the module, which takes the rows as floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import run_files
from runner.data.tables.columns import arguments, columns_in, frame_of

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

    from runner.data.tables.table import TableReader

READER = "reader.json"  # beside the weights
Reader = Mapping[str, Any]  # the node of what reads a run's inputs from a file, as in model.json


def signature_and_example(rows: Any, outputs: Any, reader: Reader | None) -> tuple[ModelSignature, Any]:
    """Of a table's rows its columns by name, and the DataFrame that they may have come from; of all others tensors."""
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types.schema import AnyType, ColSpec, Schema

    as_tensors = infer_signature(rows, outputs)
    columns = columns_in(reader)
    if columns is None:
        return as_tensors, rows
    # MLflow would refuse integers where it knows of floats, and texts where it knows of dates; the reader takes both
    inputs = Schema([ColSpec(AnyType(), name) for name in columns.names])
    return ModelSignature(inputs, as_tensors.outputs), frame_of(columns, rows)


def take_frames(path: Path, reader: Reader | None) -> None:
    """Makes the model that MLflow has saved at `path` read a DataFrame as the run's files are read, if it is a table's."""
    from mlflow.models import Model

    if reader is None or columns_in(reader) is None:
        return
    card = Model.load(str(path))
    pyfunc = card.flavors["python_function"]
    (path / pyfunc["data"] / READER).write_text(json.dumps(arguments(reader)) + "\n")
    pyfunc["loader_module"] = __name__
    card.save(str(path / "MLmodel"))


class TableModel:
    """What MLflow asks of a model: the one behind it takes float32 alone."""

    def __init__(self, model: Any, reader: TableReader) -> None:
        self._model, self._reader = model, reader

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """The model's outputs, an array. Raises: RunnerError for a value that its column can't take, with its row."""
        return self._model.predict(self._reader.frame(data).numpy(), params)

    def get_raw_model(self) -> Any:
        return self._model.get_raw_model()


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> TableModel:
    import mlflow.pytorch

    from runner.data.tables.table import TableReader  # imports torch, which who saves a model here may not have loaded

    reader = TableReader(**run_files.read_json(Path(path) / READER))
    return TableModel(mlflow.pytorch._load_pyfunc(path, model_config), reader)

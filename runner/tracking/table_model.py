"""MLflow's model of a table, which takes DataFrames by column name.

MLflow calls _load_pyfunc() of this module, so this package must be installed to load the model as a pyfunc.
mlflow.pytorch.load_model() needs only torch and returns the module, which takes rows of floats.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import run_files
from runner.data.tables.encoder import columns_in, frame_of

if TYPE_CHECKING:
    from mlflow.models import ModelSignature

    from runner.data.tables.table import TableReader

READER = "reader.json"  # next to the weights
Reader = Mapping[str, Any]  # the node of the reader of a run's inputs, as in model.json


def signature_and_example(rows: Any, outputs: Any, reader: Reader | None) -> tuple[ModelSignature, Any]:
    """Return the columns of a table by name, and the rows as a DataFrame; tensors for other data."""
    from mlflow.models import ModelSignature, infer_signature
    from mlflow.types.schema import AnyType, ColSpec, Schema

    as_tensors = infer_signature(rows, outputs)
    columns = columns_in(reader)
    if columns is None:
        return as_tensors, rows
    # MLflow would refuse integers in a float column and strings in a date column; the reader accepts both
    inputs = Schema([ColSpec(AnyType(), name) for name in columns.names])
    return ModelSignature(inputs, as_tensors.outputs), frame_of(columns, rows)


def take_frames(path: Path, reader: Reader | None) -> None:
    """Make a saved model of a table read DataFrames with the run's reader; other models stay unchanged."""
    from mlflow.models import Model

    if reader is None or columns_in(reader) is None:
        return
    card = Model.load(str(path))
    pyfunc = card.flavors["python_function"]
    arguments = {key: value for key, value in reader.items() if key != "_target_"}
    (path / pyfunc["data"] / READER).write_text(json.dumps(arguments) + "\n")
    pyfunc["loader_module"] = __name__
    card.save(str(path / "MLmodel"))


class TableModel:
    """MLflow's interface around a model that takes float32."""

    def __init__(self, model: Any, reader: TableReader) -> None:
        self._model, self._reader = model, reader

    def predict(self, data: Any, params: dict[str, Any] | None = None) -> Any:
        """Return the model's outputs, an array. Raises: RunnerError for a value that its column does not accept, with its row."""
        return self._model.predict(self._reader.frame(data).numpy(), params)

    def get_raw_model(self) -> Any:
        return self._model.get_raw_model()


def _load_pyfunc(path: str, model_config: dict[str, Any] | None = None) -> TableModel:
    import mlflow.pytorch

    from runner.data.tables.table import TableReader  # imports torch

    reader = TableReader(**run_files.read_json(Path(path) / READER))
    return TableModel(mlflow.pytorch._load_pyfunc(path, model_config), reader)

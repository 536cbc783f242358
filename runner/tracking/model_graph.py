"""A model's exported graph, as files from which MLflow's model is made without torch.

The training makes it in 0.8 s; the uploader would have to import torch first, while the user waits for the prompt.
"""

from __future__ import annotations

import io
import json
import logging
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stderr
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from runner.errors import first_line
from runner.tracking.table_model import Reader, signature_and_example, take_frames

if TYPE_CHECKING:
    import torch

FILE = "graph/model.pt2"  # MLflow's loader looks for a model.pt2 in a folder
ROWS = "rows.npz"
ABOUT = "about.json"
TRIED_ROWS = (1, 2, 7)  # the graph must accept any number of rows

log = logging.getLogger("runner.tracking")


def write_graph(
    folder: Path, module: torch.nn.Module, example: Any, *, requirements: list[str], step: int | None = None
) -> bool:
    """Export, load the export again, and compare it with the module; about 0.8 s, more for many layers.

    Args:
        module: On the CPU, in eval mode.
        step: Of its weights (None: unknown).

    Returns:
        False, and no folder, for a module without a graph for any number of rows.
    """
    import torch

    if not isinstance(example, torch.Tensor):
        return False
    if len(example) == 1:
        example = torch.cat([example, example])  # torch.export makes a dimension of 1 constant
    try:
        (folder / FILE).parent.mkdir(parents=True, exist_ok=True)
        with _silence():
            graph = torch.export.export(module, (example,), dynamic_shapes=[{0: torch.export.Dim.AUTO}])
            torch.export.save(graph, folder / FILE)
            outputs = _compared(torch.export.load(folder / FILE).module(), module, example)
        np.savez(folder / ROWS, inputs=example.numpy(), outputs=outputs.numpy())
        about = {"torch": str(torch.__version__), "requirements": requirements, "step": step}
        (folder / ABOUT).write_text(json.dumps(about) + "\n")
    except Exception as error:
        log.info("the model has no graph for any number of rows: %s", first_line(error))
        forget_graph(folder)
        return False
    return True


@contextmanager
def _silence() -> Iterator[None]:
    """Drop the warnings and logs of an export, and the part of the graph that it prints."""
    disabled = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(disabled)


def _compared(graph: Any, module: torch.nn.Module, example: torch.Tensor) -> torch.Tensor:
    """Return the module's outputs for the example. Raises: AssertionError if the graph's differ."""
    import torch

    with torch.no_grad():
        for count in TRIED_ROWS:
            rows = torch.cat([example] * count)[:count]
            torch.testing.assert_close(graph(rows), module(rows), equal_nan=True)
        outputs: torch.Tensor = module(example)
    return outputs


def has_graph(folder: Path) -> bool:
    return (folder / ABOUT).is_file()  # written last


def step_of(folder: Path) -> int | None:
    """Return the step of the graph's weights (None: unknown)."""
    step: int | None = json.loads((folder / ABOUT).read_text()).get("step")
    return step


def forget_graph(folder: Path) -> None:
    """Remove the files, if they exist."""
    shutil.rmtree(folder, ignore_errors=True)


def as_model(folder: Path, path: Path, run_id: str, *, reader: Reader | None = None) -> None:
    """Make MLflow's model directory at `path` from the graph in `folder`, for both of MLflow's loaders.

    mlflow.pytorch.save_model would import torch.

    Args:
        reader: Of the run's inputs; a table's reads DataFrames.
    """
    from mlflow import pyfunc
    from mlflow.models import Model

    about = json.loads((folder / ABOUT).read_text())
    with np.load(folder / ROWS) as rows:
        inputs, outputs = rows["inputs"], rows["outputs"]
    card = Model(run_id=run_id)
    card.add_flavor("pytorch", model_data="data/graph", pytorch_version=about["torch"], code=None)
    with _versions_unquestioned(), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about MLflow's code
        signature, example = signature_and_example(inputs, outputs, reader)
        pyfunc.save_model(
            str(path),
            loader_module="mlflow.pytorch",
            data_path=str((folder / FILE).parent),
            mlflow_model=card,
            model_config={"device": None},
            signature=signature,
            input_example=example,
            pip_requirements=about["requirements"],
        )
        take_frames(path, reader)


@contextmanager
def _versions_unquestioned() -> Iterator[None]:
    """Skip MLflow's check of the installed versions: it reads the files of every installed package, 0.4 s."""
    from mlflow.utils import environment

    name = "warn_dependency_requirement_mismatches"  # a later MLflow may not have it: that only costs time
    before = getattr(environment, name, None)
    setattr(environment, name, lambda *_: None)
    try:
        yield
    finally:
        setattr(environment, name, before)

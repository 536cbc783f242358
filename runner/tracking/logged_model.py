"""A model's recipe, its weights and a few rows go in; an MLflow model comes out, with signature and input example."""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Callable, Mapping
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.tracking.events import Event, LeftOutError, own_file

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient

Build = Callable[[dict[str, Any]], Any]

NAME = "model"
RECORD_TAG = "runner.record"  # which record of the journal the model came from
TRIED_ROWS = (1, 2, 7)  # an exported model must take any number

log = logging.getLogger("runner.publish")


def publish_model(
    client: MlflowClient, run_id: str, experiment_id: str, *, folder: Path, event: Event, build: Build | None = None
) -> None:
    """Makes `runs:/RUN/model`: an exported graph (pt2: loads without this package and without pickle) where the model
    allows one, else a pickle with the modules of the current folder.

    MLflow's own log_model is not used: it reads the whole history of every metric on the way.
    Raises: LeftOutError when the model can't be made; what MLflow raises when it can't be stored now.
    """
    with tempfile.TemporaryDirectory() as place:
        try:
            path = save(Path(place), run_id, *_rebuilt(folder, event, build or _build))
        except Exception as error:
            raise LeftOutError(f"{type(error).__name__}: {error}") from error
        _store(client, run_id, experiment_id, path, record=str(event.get("record", 0)))


def warm_up() -> None:
    """Saves a tiny model for the imports and caches that come with it: 4 s that would else come after training."""
    import torch

    with tempfile.TemporaryDirectory() as place:
        save(Path(place), "", torch.nn.Linear(1, 1).eval(), torch.zeros(2, 1))


def _build(node: dict[str, Any]) -> Any:
    from runner.passwords import filled_in
    from runner.targets import build

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # the person's own modules; not before now, one named torch.py would break everything
    return build(filled_in(node), key=NAME)


def _rebuilt(folder: Path, event: Event, build: Build) -> tuple[torch.nn.Module, Any]:
    """The module with the run's weights, ready to predict, and the rows to try it with."""
    import torch

    module = build(dict(event["node"]))
    state = torch.load(own_file(folder, event["weights"]), map_location="cpu", weights_only=True)
    module.load_state_dict(state["model"])
    return module.eval(), torch.load(own_file(folder, event["example"]), map_location="cpu", weights_only=True)


def save(place: Path, run_id: str, module: torch.nn.Module, example: Any) -> Path:
    """MLflow's folder of a model below `place`: a graph where that works for any number of rows, else a pickle."""
    import torch
    from mlflow.models import Model, infer_signature

    if isinstance(example, torch.Tensor) and len(example) == 1:
        example = torch.cat([example, example])  # an export takes a dimension of 1 for a constant
    with torch.no_grad():
        outputs = module(example)
    rows = _to_numpy(example)
    settings: dict[str, Any] = {
        "signature": infer_signature(rows, _to_numpy(outputs)),
        "input_example": rows,
        "pip_requirements": [f"{name}=={metadata.version(name).split('+')[0]}" for name in ("torch", "numpy")],
    }
    exported, pickled = place / "exported", place / "pickled"
    if isinstance(example, torch.Tensor) and _export(exported, Model(run_id=run_id), module, example, settings):
        return exported
    code = _own_code(module)
    _save_with_mlflow(module, pickled, Model(run_id=run_id), "pickle", {**settings, "code_paths": code or None})
    return pickled


def _export(path: Path, card: Any, module: torch.nn.Module, example: torch.Tensor, settings: Mapping[str, Any]) -> bool:
    """Saves the graph, loads it again and compares it with the module. False when the model does not bear that."""
    import torch

    try:
        _save_with_mlflow(module, path, card, "pt2", settings)
        graph = torch.export.load(path / "data" / "model.pt2").module()
        with torch.no_grad():
            for count in TRIED_ROWS:
                rows = torch.cat([example] * count)[:count]
                torch.testing.assert_close(graph(rows), module(rows), equal_nan=True)
    except Exception as error:
        log.info("the model has no graph for any number of rows: %s", error)
        return False
    return True


def _save_with_mlflow(module: torch.nn.Module, path: Path, card: Any, form: str, settings: Mapping[str, Any]) -> None:
    import mlflow.pytorch

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # they are about MLflow's and torch's own code
        mlflow.pytorch.save_model(module, str(path), mlflow_model=card, serialization_format=form, **settings)


def _to_numpy(tree: Any) -> Any:
    import torch

    if isinstance(tree, torch.Tensor):
        return tree.numpy()
    if isinstance(tree, dict):
        return {key: _to_numpy(value) for key, value in tree.items()}
    return [_to_numpy(value) for value in tree]


def _own_code(module: torch.nn.Module) -> list[str]:
    """The modules and packages of the current folder that the model's classes come from; a pickle needs them."""
    here = Path.cwd()
    found = set()
    for part in module.modules():
        source = getattr(sys.modules.get(type(part).__module__), "__file__", None)
        if source and Path(source).is_relative_to(here) and "site-packages" not in Path(source).parts:
            found.add(here / Path(source).relative_to(here).parts[0])
    return sorted(map(os.fspath, found))


def _store(client: MlflowClient, run_id: str, experiment_id: str, path: Path, *, record: str) -> None:
    """Stores the saved model once: an earlier attempt's entry is filled, a finished one is left alone."""
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus
    from mlflow.models import Model

    wanted = f"source_run_id = '{run_id}' AND name = '{NAME}'"
    earlier = [
        found for found in client.search_logged_models([experiment_id], wanted) if found.tags.get(RECORD_TAG) == record
    ]
    if any(found.status == LoggedModelStatus.READY for found in earlier):
        return
    if earlier:
        entry = earlier[0]
    else:
        tags = {RECORD_TAG: record}
        entry = client.create_logged_model(experiment_id, name=NAME, source_run_id=run_id, tags=tags)
    card = Model.load(str(path))
    card.model_id = card.model_uuid = entry.model_id
    card.artifact_path = entry.artifact_location
    card.save(str(path / "MLmodel"))
    outputs = client.get_run(run_id).outputs
    if entry.model_id not in {output.model_id for output in (outputs.model_outputs if outputs else ())}:
        client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, step=0)])
    client.log_model_artifacts(entry.model_id, str(path))
    client.finalize_logged_model(entry.model_id, LoggedModelStatus.READY)

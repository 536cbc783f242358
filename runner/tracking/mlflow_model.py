"""A run's model in MLflow: with signature, input example, its step, and its metrics at that step.

The training writes an event to the journal; the uploader, `sync`, `register` and `export` build the model from it.
An event has `node`, `weights`, `example` and `card`. MLflow's page of models also shows `name`, `step`, `params`, `metrics`
as {name: [value, step, time_ms]} and `dataset` as [name, digest]; they may be missing. `kept`: not the best checkpoint.
"""

from __future__ import annotations

import logging
import math
import os
import sys
import tempfile
import threading
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.config import run_files
from runner.config.importing import loading
from runner.errors import first_line
from runner.tracking import mlflow_store
from runner.tracking.journal_records import FILE as JOURNAL
from runner.tracking.journal_records import scan_names
from runner.tracking.mlflow_events import Event, LeftOutError, own_file
from runner.tracking.mlflow_names import MAX_NAME, Names, cut, valid_model_name, valid_names
from runner.tracking.model_graph import as_model, forget_graph, has_graph, step_of, write_graph
from runner.tracking.table_model import Reader, signature_and_example, take_frames

if TYPE_CHECKING:
    import torch
    from mlflow import MlflowClient
    from mlflow.entities import LoggedModel

Build = Callable[[dict[str, Any]], Any]

NAME = "model"  # if the event has none
BEST = "checkpoints/best.pt"
GRAPH = "journal/exported"  # in a run directory, until the store has it
OFF = "tracking.log_model=false"
NO_MODELS = f"the server's MLflow is older than 3 and has no logged models; set {OFF}, or update the server"
BUILDING = threading.Lock()  # torch.export and pickling are not thread-safe
RECORD_TAG = "runner.record"  # the model's record in the journal
WEIGHTS_TAG = "runner.weights"  # the model's file in the run directory
MAX_PARAM = 500  # characters of a param: longer ones hide the others on a page

log = logging.getLogger("runner.tracking")


def publish_model(
    client: MlflowClient,
    run_id: str,
    experiment_id: str,
    *,
    folder: Path,
    event: Event,
    build: Build | None = None,
    takes_graph: bool = False,
) -> None:
    """Make `runs:/RUN/NAME`: an exported graph (pt2, without this package or pickle) if the model has one, else a pickle.

    The pickle includes modules of the current directory. MLflow's log_model is not used, as it reads the complete history
    of every metric.

    Args:
        takes_graph: Whether to use the graph that the training left next to its journal. False for a directory of another
            user, as a graph is code.

    Raises:
        LeftOutError: If the model can't be made.
        Exception: Of MLflow, if the model can't be stored now.
    """
    from mlflow.entities import LoggedModelStatus

    record = str(event.get("record", 0))
    earlier = [each for each in models_of(client, run_id, experiment_id) if each.tags.get(RECORD_TAG) == record]
    if any(each.status == LoggedModelStatus.READY for each in earlier):  # sent already; its weights may be overwritten
        return
    with tempfile.TemporaryDirectory() as place:
        try:
            with BUILDING:
                shown = _shown(folder, event)
                reader = run_files.read_json(own_file(folder, event["card"]))["reader"] if "card" in event else None
                if takes_graph and not event.get("kept") and has_graph(graph := own_file(folder, GRAPH)):
                    _check_step(step_of(graph), event, what="the run's graph")
                    as_model(graph, path := Path(place) / "exported", run_id, reader=reader)
                else:
                    path = save(Path(place), run_id, *_rebuilt(folder, event, build or build_own), reader=reader)
        except LeftOutError:
            raise
        except Exception as error:
            raise LeftOutError(f"{type(error).__name__}: {error}") from error
        _store(client, run_id, experiment_id, path, shown, earlier=earlier)
    if not event.get("kept"):
        forget_graph(folder / GRAPH)


def leave_graph(folder: Path, event: Event) -> bool:
    """Make the graph in the training process, for publish_model(takes_graph=True) without torch.

    Args:
        event: The model's event in the journal.

    Returns:
        False if the model has no graph.
    """
    import torch

    try:
        # random numbers that the training draws later are the same without a tracker
        with loading(), torch.random.fork_rng(devices=[]):
            rebuilt = _rebuilt(folder, event, build_own)
            return write_graph(folder / GRAPH, *rebuilt, requirements=_requirements(), step=event.get("step"))
    except Exception as error:  # reported by publish_model
        log.info("the model has no graph: %s", error)
        return False


def build_own(node: dict[str, Any]) -> Any:
    """Build a model as a run does, with code of the current directory and environment variables."""
    from runner.config.instantiate import build
    from runner.config.secrets import filled_in

    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)  # for the user's modules; not earlier, as one may be called torch.py
    return build(filled_in(node), key=NAME)


def _rebuilt(folder: Path, event: Event, build: Build) -> tuple[torch.nn.Module, Any]:
    import torch

    from runner.models.weights import load_trained

    module = build(dict(event["node"]))
    state = torch.load(own_file(folder, event["weights"]), map_location="cpu", weights_only=True)
    _check_step(state.get("step"), event, what=event["weights"])
    load_trained(module, state.get("average") or state["model"])  # a kept checkpoint may have both
    return module.eval(), torch.load(own_file(folder, event["example"]), map_location="cpu", weights_only=True)


def _check_step(step: int | None, event: Event, *, what: str) -> None:
    if None not in (step, event.get("step")) and step != event["step"]:
        raise LeftOutError(f"{what} has the weights of step {step} now, and the model is of step {event['step']}")


def save(place: Path, run_id: str, module: torch.nn.Module, example: Any, *, reader: Reader | None = None) -> Path:
    """Write MLflow's model directory below `place`: a graph if it works for any number of rows, else a pickle.

    reader: Of the run's inputs. With a table's reader, the model takes DataFrames.
    """
    if write_graph(place / "graph", module, example, requirements=_requirements()):
        as_model(place / "graph", place / "exported", run_id, reader=reader)
        return place / "exported"
    return _pickle(place / "pickled", run_id, module, example, reader)


def _pickle(path: Path, run_id: str, module: torch.nn.Module, example: Any, reader: Reader | None) -> Path:
    import mlflow.pytorch
    import torch
    from mlflow.exceptions import MlflowException
    from mlflow.models import Model

    from runner.models.example import call, named

    try:
        with torch.no_grad():
            outputs = call(module, example)
    except Exception as error:
        reason = f"its forward pass fails for an example: {type(error).__name__}: {first_line(error)}"
        raise LeftOutError(f"{reason}; call the model as `model(...)` in the task, or set {OFF}") from error
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about code of MLflow and torch
        signature, rows = None, None
        with suppress(MlflowException):  # inputs or outputs that a signature does not support
            signature, rows = signature_and_example(_to_numpy(named(module, example)), _to_numpy(outputs), reader)
        mlflow.pytorch.save_model(
            module,
            str(path),
            mlflow_model=Model(run_id=run_id),
            serialization_format="pickle",
            signature=signature,
            input_example=rows,
            pip_requirements=_requirements(),
            code_paths=_own_code(module) or None,
        )
        take_frames(path, reader)
    return path


def _requirements() -> list[str]:
    return [f"{name}=={metadata.version(name).split('+')[0]}" for name in ("torch", "numpy")]


def _to_numpy(tree: Any) -> Any:
    import torch

    if isinstance(tree, torch.Tensor):
        return tree.numpy()
    if isinstance(tree, dict):
        return {key: _to_numpy(value) for key, value in tree.items()}
    return [_to_numpy(value) for value in tree] if isinstance(tree, list | tuple) else tree


def _own_code(module: torch.nn.Module) -> list[str]:
    """Return the modules and packages in the current directory that define the model's classes; a pickle needs them."""
    here = Path.cwd()
    found = set()
    for part in module.modules():
        name = type(part).__module__
        source = Path(getattr(sys.modules.get(name), "__file__", None) or os.devnull)
        top = here / name.partition(".")[0]
        if "site-packages" not in source.parts:
            found |= {path for path in (top, top.with_name(f"{top.name}.py")) if source.is_relative_to(path)}
    return sorted(map(os.fspath, found))


def models_of(client: MlflowClient, run_id: str, experiment_id: str) -> list[LoggedModel]:
    """Return all logged models of a run, in any state. Raises: LeftOutError if the server does not support them."""
    from mlflow.exceptions import MlflowException

    try:
        return list(client.search_logged_models([experiment_id], f"source_run_id = '{run_id}'"))
    except MlflowException as error:
        if mlflow_store.is_older(error):
            client.get_run(run_id)  # raises if the server does not answer
            raise LeftOutError(NO_MODELS) from error
        raise


def is_best(model: LoggedModel) -> bool:
    """Return whether this is the run's best model, not another kept checkpoint."""
    return model.tags.get(WEIGHTS_TAG, BEST) == BEST


def _store(
    client: MlflowClient, run_id: str, experiment_id: str, path: Path, shown: _Shown, *, earlier: list[LoggedModel]
) -> None:
    """Store the saved model once, in the entry of an earlier attempt if there is one.

    The status READY is set last, and every call before it may be repeated.
    """
    from mlflow.entities import LoggedModelOutput, LoggedModelStatus, Metric
    from mlflow.models import Model

    output_ids = set[str]()
    if earlier:
        entry = earlier[0]
        outputs = client.get_run(run_id).outputs
        output_ids = {output.model_id for output in (outputs.model_outputs if outputs else ())}
    else:
        entry = client.create_logged_model(
            experiment_id, name=shown.name, source_run_id=run_id, tags=shown.tags, params=shown.params
        )
    card = Model.load(str(path))
    card.model_id = card.model_uuid = entry.model_id
    card.artifact_path = entry.artifact_location
    card.save(str(path / "MLmodel"))
    if entry.model_id not in output_ids:
        client.log_outputs(run_id, [LoggedModelOutput(entry.model_id, step=shown.step)])
    if shown.metrics:  # points that the run has already: they are stored once
        client.log_batch(run_id, [Metric(**metric, model_id=entry.model_id) for metric in shown.metrics])
    client.log_model_artifacts(entry.model_id, str(path))
    client.finalize_logged_model(entry.model_id, LoggedModelStatus.READY)


@dataclass(frozen=True)
class _Shown:
    name: str
    step: int
    tags: dict[str, str]
    params: dict[str, str]
    metrics: list[dict[str, Any]]  # fields of mlflow.entities.Metric


def _shown(folder: Path, event: Event) -> _Shown:
    """Return the fields of MLflow's page. NaN is left out, as MLflow would store it as 0, the best of all losses."""
    journal = folder / JOURNAL
    names = Names(scan_names(journal) if event.get("metrics") and journal.is_file() else ())  # names of its points
    measured = {
        names.key(name): (float(point[0]), int(point[1]), int(point[2]))
        for name, point in (event.get("metrics") or {}).items()
    }
    of_data = {}
    if event.get("dataset"):
        name, digest = map(str, event["dataset"])
        of_data = {"dataset_name": cut(name, most=2 * MAX_NAME), "dataset_digest": digest[:36]}
    return _Shown(
        name=valid_model_name(str(event.get("name") or NAME)),
        step=int(event.get("step") or 0),
        tags={RECORD_TAG: str(event.get("record", 0)), WEIGHTS_TAG: str(event["weights"])},
        params=valid_names(event.get("params") or {}, most=MAX_PARAM),
        metrics=[
            {"key": key, "value": value, "step": step, "timestamp": time_ms, **of_data}
            for key, (value, step, time_ms) in measured.items()
            if math.isfinite(value)
        ],
    )

"""`register`: make a run's model a version of a registered model in MLflow."""

from __future__ import annotations

import re
import shlex
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from runner.command import Arguments
from runner.config.instantiate import build
from runner.config.secrets import filled_in
from runner.errors import Problem, RunnerError, at_once, refuse
from runner.experiment.terminal import say, short
from runner.runs.load import BEST, Trained, find_run, open_run
from runner.runs.store import answering, as_default, store_of
from runner.tracking import mlflow_model, mlflow_store, recipes, store_uri
from runner.tracking.ack import Ack, read_ack
from runner.tracking.journal_reader import read_events
from runner.tracking.mlflow_events import LeftOutError
from runner.tracking.sync import sync
from runner.training import checkpoint

if TYPE_CHECKING:
    from mlflow import MlflowClient

#: characters that MLflow refuses in names and aliases
REFUSED = "/:\\"


def register(arguments: Arguments) -> dict[str, Any]:
    """Register the model, set the alias, and print the version. Sends missing points of the run first.

    Returns:
        The version, and how to load it.

    Raises:
        RunnerError: If MLflow refuses a name, does not have the run, or does not answer.
    """
    wanted, name, alias = arguments.run, arguments["--name"], arguments["--alias"]
    at_once(partial(_check_names, name, alias), partial(find_run, wanted, verb="register"))
    folder, weights = find_run(wanted, verb="register")
    if weights != BEST:
        problem = "MLflow's registry stores the run's best weights only"
        raise RunnerError.suggest(f"register {wanted}", problem, [f"python -m runner register {short(folder)}"])
    asked = f"register {wanted}"
    uri = store_of(folder, arguments.overrides, asked=asked)
    ack = _sent(folder, uri, asked=asked)
    with answering(asked, uri), as_default(uri):
        client = mlflow_store.open_store(uri)
        mlflow_store.check_run(client, str(ack.run_id))
        model_id = _model_of(client, folder, ack)
        version, is_new = _version(client, name, model_id, str(ack.run_id), again=arguments["--again"])
        if alias is not None:
            client.set_registered_model_alias(name, alias, version)
    say(
        f"model   {name}, version {version}{'' if is_new else ', as it was'}: run {ack.run_id} in {store_uri.shown(uri)}"
    )
    address = f"models:/{name}@{alias}" if alias else f"models:/{name}/{version}"
    say(f"load    mlflow.pytorch.load_model({address!r})")
    return {"name": name, "version": version, "is_new": is_new, "alias": alias, "run_id": ack.run_id, "uri": address}


def _check_names(name: str, alias: str | None) -> None:
    problems = []
    for flag, value in (("--name", name), ("--alias", alias)):
        if value is not None and (not value.strip() or set(REFUSED) & set(value)):
            problem = f"an MLflow name can't be empty or contain {' '.join(REFUSED)}"
            instead = "-".join(filter(None, re.split(rf"[{re.escape(REFUSED)}\s]+", value))) or "digits"
            problems.append(Problem.suggest(f"{flag} {value}", problem, [f"{flag} {shlex.quote(instead)}"]))
    if alias is not None and (alias == "latest" or (alias[1:].isdigit() and alias[:1].lower() == "v")):
        problems.append(
            Problem.suggest(f"--alias {alias}", "MLflow reserves `latest`, `v1`, `v2`, ...", ["--alias champion"])
        )
    refuse(problems)


def _sent(folder: Path, uri: str, *, asked: str) -> Ack:
    ack = read_ack(folder)
    if not ack.is_complete or ack.uri != store_uri.shown(uri):
        with answering(asked, uri):
            ack = sync(folder, uri, build=recipes.build_of(folder))
    if ack.run_id is None or not ack.is_complete:
        problem = f"the run is not complete in MLflow: {ack.error or 'it was not tracked, or has not ended'}"
        raise RunnerError.of(asked, problem, f"run `python -m runner sync {short(folder)}`, then the same command")
    return ack


def _model_of(client: MlflowClient, folder: Path, ack: Ack) -> str:
    step = _best_step(folder)
    try:
        if not (found := _logged(client, ack, step)):
            # raises an error that explains why the model can't be loaded
            trained = open_run((folder, BEST), device="cpu", uses_autocast=False)
            event = _event(folder, trained)
            mlflow_model.publish_model(
                client, str(ack.run_id), str(ack.experiment_id), folder=folder, event=event, build=_build
            )
            found = _logged(client, ack, step)
    except LeftOutError as error:
        problem = f"MLflow has no model of the run, and none can be made: {error}"
        raise RunnerError.of(f"register {short(folder)}", problem, "use a run whose model can be logged") from error
    return found


def _best_step(folder: Path) -> int | None:
    file = folder / BEST
    return int(checkpoint.load(file).get("step") or 0) if file.is_file() else None


def _logged(client: MlflowClient, ack: Ack, step: int | None) -> str:
    from mlflow.entities import LoggedModelStatus

    found = mlflow_model.models_of(client, str(ack.run_id), str(ack.experiment_id))
    ready = [model for model in found if model.status == LoggedModelStatus.READY and mlflow_model.is_best(model)]
    if ready and step is not None:
        outputs = client.get_run(str(ack.run_id)).outputs
        at_step = {output.model_id for output in (outputs.model_outputs if outputs else ()) if output.step == step}
        ready = [model for model in ready if model.model_id in at_step]
    return str(max(ready, key=lambda model: model.creation_timestamp).model_id) if ready else ""


def _build(node: dict[str, Any]) -> Any:
    return build(filled_in(node), key=mlflow_model.NAME)


def _event(folder: Path, trained: Trained) -> dict[str, Any]:
    import torch

    from runner.experiment.run_record import EXAMPLE, model_event
    from runner.runs.inputs import example

    if not (folder / EXAMPLE).is_file():
        torch.save(example(trained), folder / EXAMPLE)
    used = [[event["name"], event["digest"]] for event in read_events(folder) if event["kind"] == "dataset"]
    event = model_event(folder, trained.card, EXAMPLE, step=trained.step, dataset=used[-1] if used else None)
    return event | {"record": f"step-{trained.step}"}  # not a record of the journal; unique for each step's weights


def _version(client: MlflowClient, name: str, model_id: str, run_id: str, *, again: bool) -> tuple[str, bool]:
    from mlflow.exceptions import MlflowException

    quote = '"' if "'" in name else "'"
    try:
        client.create_registered_model(name)
    except MlflowException as error:
        if error.error_code != "RESOURCE_ALREADY_EXISTS":
            raise
    source = f"models:/{model_id}"
    there = [
        found
        for found in client.search_model_versions(f"name={quote}{name}{quote}")
        if found.source == source or found.model_id == model_id
    ]
    if there and not again:
        return str(max(int(found.version) for found in there)), False
    made = client.create_model_version(name, source, run_id=run_id, model_id=model_id)
    return str(made.version), True

"""`register`: make a run's model a version of a registered model in MLflow."""

from __future__ import annotations

import re
import shlex
from functools import partial
from typing import TYPE_CHECKING, Any

from runner.command import Arguments
from runner.config.instantiate import build
from runner.config.secrets import filled_in
from runner.errors import Problem, RunnerError, at_once, refuse
from runner.experiment.directory import BEST, EXAMPLE, Run
from runner.experiment.terminal import say, short
from runner.runs.find import find_trained
from runner.runs.load import Trained, open_on_cpu
from runner.runs.store import answering, as_default, store_of
from runner.tracking import mlflow_model, mlflow_store, recipes, store_uri
from runner.tracking.ack import Ack
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
    _, run = at_once(partial(_check_names, name, alias), partial(find_trained, wanted, verb="register"))
    folder = run.folder
    if run.weights != BEST:
        problem = "MLflow's registry stores the run's best weights only"
        raise RunnerError.suggest(f"register {wanted}", problem, [f"python -m runner register {short(folder)}"])
    asked = f"register {wanted}"
    uri = store_of(folder, arguments.overrides, asked=asked)
    ack = _sent(run, uri, asked=asked)
    with answering(asked, uri), as_default(uri):
        client = mlflow_store.open_store(uri)
        mlflow_store.check_run(client, str(ack.run_id))
        model_id = _model_of(client, run, ack)
        version, is_new = _version(client, name, model_id, str(ack.run_id), again=arguments["--again"])
        if alias is not None:
            client.set_registered_model_alias(name, alias, version)
    before = "" if is_new else ", as it was"
    say(f"model   {name}, version {version}{before}: run {ack.run_id} in {store_uri.shown(uri)}")
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
        problem = "MLflow reserves `latest`, `v1`, `v2`, ..."
        problems.append(Problem.suggest(f"--alias {alias}", problem, ["--alias champion"]))
    refuse(problems)


def _sent(run: Run, uri: str, *, asked: str) -> Ack:
    ack = run.ack
    if not ack.is_complete or ack.uri != store_uri.shown(uri):
        with answering(asked, uri):
            ack = sync(run.folder, uri, build=recipes.build_of(run.folder))
    if ack.run_id is None or not ack.is_complete:
        problem = f"the run is not complete in MLflow: {ack.error or 'it was not tracked, or has not ended'}"
        raise RunnerError.of(asked, problem, f"run `python -m runner sync {short(run.folder)}`, then the same command")
    return ack


def _model_of(client: MlflowClient, run: Run, ack: Ack) -> str:
    best, ids = run.folder / BEST, (str(ack.run_id), str(ack.experiment_id))
    step = int(checkpoint.load(best).get("step") or 0) if best.is_file() else None
    try:
        if not (model_id := _logged(client, *ids, step)):
            event = _event(run, open_on_cpu(run))  # which explains why a model can't be loaded
            mlflow_model.publish_model(client, *ids, folder=run.folder, event=event, build=_build)
            model_id = _logged(client, *ids, step)
    except LeftOutError as error:
        problem = f"MLflow has no model of the run, and none can be made: {error}"
        raise RunnerError.of(f"register {short(run.folder)}", problem, "use a run whose model can be logged") from error
    return model_id


def _logged(client: MlflowClient, run_id: str, experiment_id: str, step: int | None) -> str:
    from mlflow.entities import LoggedModelStatus

    models = mlflow_model.models_of(client, run_id, experiment_id)
    ready = [each for each in models if each.status == LoggedModelStatus.READY and mlflow_model.is_best(each)]
    if ready and step is not None:
        outputs = client.get_run(run_id).outputs
        at_step = {each.model_id for each in (outputs.model_outputs if outputs else ()) if each.step == step}
        ready = [each for each in ready if each.model_id in at_step]
    return str(max(ready, key=lambda each: each.creation_timestamp).model_id) if ready else ""


def _build(node: dict[str, Any]) -> Any:
    return build(filled_in(node), key=mlflow_model.NAME)


def _event(run: Run, trained: Trained) -> dict[str, Any]:
    import torch

    from runner.experiment.reporter import model_event
    from runner.runs.inputs import example

    if not (run.folder / EXAMPLE).is_file():
        torch.save(example(trained), run.folder / EXAMPLE)
    used = [[event["name"], event["digest"]] for event in run.events("dataset")]
    event = model_event(run.folder, trained.card, EXAMPLE, step=trained.step, dataset=used[-1] if used else None)
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
    versions = client.search_model_versions(f"name={quote}{name}{quote}")
    same = [int(each.version) for each in versions if each.source == source or each.model_id == model_id]
    if same and not again:
        return str(max(same)), False
    made = client.create_model_version(name, source, run_id=run_id, model_id=model_id)
    return str(made.version), True

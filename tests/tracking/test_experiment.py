"""The environment names the experiment, like the store; a deleted one keeps its name, and the error says so."""

import json

from runner import cli
from runner.tracking import mlflow_store

WORDS = (
    "model=linear",
    "device=cpu",
    "data.limit=200",
    "train.num_steps=1",
    "hydra.run.dir=run",
    "tracking.log_model=false",
)


def test_deleted_experiment_from_environment_is_reported(own_folder, uri, client, monkeypatch, capfd):
    experiment_id, _ = mlflow_store.experiment_of(client, "team/from env", uri=uri)
    client.delete_experiment(experiment_id)
    monkeypatch.setenv("MLFLOW_EXPERIMENT_NAME", "team/from env")
    assert cli.main([*WORDS, f"tracking.uri={uri}"]) == 0
    told = "the experiment team/from env was deleted in MLflow; this run is in team/from env-2"
    assert f"tracking: {told}" in capfd.readouterr().out
    summary = json.loads((own_folder / "run" / "summary.json").read_text())
    run = client.get_run(summary["run_id"])
    assert client.get_experiment(run.info.experiment_id).name == "team/from env-2"
    assert run.data.params["tracking.experiment"] == "team/from env"

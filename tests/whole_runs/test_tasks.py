"""Tasks for a script or an agent that reads only --json and exit codes; tests/cli/test_answer.py has more."""

import csv
import json
import os
import re
import shlex
from pathlib import Path

import pytest
from trained_runs import inside

from runner import cli
from runner.cli import commands

#: small and fast settings
RUN = ("data=iris", "model=linear", "train.num_epochs=2", "train.batch_size=32", "tracking.enabled=false", "device=cpu")
OWN_TASK = (*RUN, "task=own", "task.function._target_=own.sometimes")
RUN = ("task.plots=false", *RUN)
OWN = """
import os
import re
import torch

def sometimes(model, batch):
    loss = torch.nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"loss": loss, "odd": loss * (1 / (0 if os.environ.get("BREAK") else 1))}

def explodes(model, batch):
    return {"loss": sometimes(model, batch)["loss"] * 1e38 * 1e38}
"""


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("agent")


@pytest.fixture
def ask(place, warm_jobs, warm_programs, capfd):
    """Return a function that runs a command with --json, and returns its exit code and the document on stdout."""

    def run(*words):
        capfd.readouterr()
        code = cli.main([*words, "--json"])
        return code, json.loads(capfd.readouterr().out)

    (place / "own.py").write_text(OWN)
    with inside(place):
        yield run


@pytest.fixture
def trained(ask):
    """A finished run, trained by the first task that needs it."""
    return once(ask, "trained", *RUN, "hydra.run.dir=outputs/shared/run")


@pytest.fixture
def swept(ask):
    words = ("-m", *RUN, "model=linear,mlp", "seed=range(8)", "hydra.sweep.dir=multirun/shared/sweep")
    return once(ask, "swept", *words)


def once(ask, name, *words):
    file = Path(f"{name}.json")
    if not file.exists():
        code, found = ask(*words)
        assert code == 0
        file.write_text(json.dumps(found))
    return json.loads(file.read_text())


def test_a_misspelled_command(ask, trained):
    code, found = ask("histroy", trained["folder"])
    assert code == 2
    ((line,),) = (problem["suggestions"] for problem in found["faults"])
    assert ask(*shlex.split(line)[3:])[0] == 0


def test_nothing_to_resume(ask, tmp_path):
    with inside(tmp_path):
        assert [ask(verb)[0] for verb in ("resume", "reproduce", "report", "history", "sync", "try")] == [2] * 6


def test_best_job_of_sweep_is_evaluated(ask, swept):
    best = swept["jobs"][0]
    code, found = ask("evaluate", str(Path(swept["folder"], best["folder"])))
    assert code == 0 and found["metrics"]["val/loss"] == pytest.approx(best["best"]["value"], rel=1e-5)


def test_models_are_compared_with_interval(ask, swept):
    code, found = ask("compare", f"{swept['folder']}:model=mlp", f"{swept['folder']}:model=linear", "metric=val/loss")
    (one,) = found["comparisons"]
    assert code == 0 and one["difference"]["n"] == 8
    assert one["verdict"] == "better" and one["difference"]["high"] < 0 < one["difference"]["p_value"] < 0.05


def test_a_metric_that_is_not_there(ask, swept):
    sides = [f"{swept['folder']}:model=mlp", f"{swept['folder']}:model=linear"]
    code, found = ask("compare", *sides, "metric=test/acuracy")
    assert code == 2
    code, found = ask("compare", *sides, found["faults"][0]["suggestions"][0])
    assert code == 0 and found["comparisons"][0]["metric"] == "test/accuracy"


def test_failed_job_is_fixed(ask, monkeypatch):
    words = ["-m", *OWN_TASK, "optimizer.lr=0.01,0.02", "sweep.batch=off"]
    monkeypatch.setenv("BREAK", "1")
    code, found = ask(*words, "hydra.sweep.dir=multirun/broken/sweep")
    assert code == 1 and [job["state"] for job in found["jobs"]] == ["failed"] * 2
    assert all("ZeroDivisionError" in job["error"] for job in found["jobs"])
    monkeypatch.delenv("BREAK")
    code, found = ask(*words, f"sweep.resume={found['folder']}", "sweep.retry=true")
    assert code == 0 and [job["state"] for job in found["jobs"]] == ["finished"] * 2


def test_where_it_became_nan(ask):
    code, found = ask(*OWN_TASK, "task.function._target_=own.explodes")
    assert (code, found["status"]) == (1, "failed") and "train/loss is inf at step 1" in found["error"]
    code, points = ask("history", found["folder"])
    assert code == 0 and points["metrics"]["train/loss"]["first"] is None
    code, found = ask(*OWN_TASK)
    assert (code, found["status"]) == (0, "finished")


def test_the_step_with_the_least_loss(ask, trained):
    code, found = ask("history", trained["folder"], "--output", "points.csv")
    assert code == 0
    with Path(found["output"]).open() as stream:
        points = [
            (float(row["value"]), int(row["step"])) for row in csv.DictReader(stream) if row["metric"] == "val/loss"
        ]
    assert min(points)[1] == trained["best"]["step"]


def test_answers_for_new_rows(ask, trained):
    code, found = ask("predict", trained["folder"])
    flags = [flag for problem in found["faults"] for flag in problem["asked"].split() if flag.startswith("--")]
    assert code == 2 and flags == ["--input", "--output"]
    words = ("predict", trained["folder"], "--input", "new.csv", "--output", "answers.csv")
    for columns in (["a", "b"], None):
        columns = columns or re.findall(r"'([^']+)'", found["faults"][0]["so"].partition(";")[0])
        Path("new.csv").write_text("\n".join([",".join(columns), *[",".join("1" for _ in columns)] * 2]) + "\n")
        code, found = ask(*words)
    assert code == 0 and len(Path("answers.csv").read_text().splitlines()) == 3


def test_a_format_that_is_not_there(ask, trained):
    code, found = ask("export", trained["folder"], "--format", "safetensor")
    assert code == 2
    code, found = ask("export", trained["folder"], *shlex.split(found["faults"][0]["suggestions"][0]))
    assert code == 0 and Path(found["path"]).is_file()


def test_would_it_fit(ask):
    big = [*RUN, "device=cuda:0", "model=mlp", "model.hidden_sizes=[4000,4000]"]
    assert [ask("plan", *big, f"plan.device_memory={size}")[0] for size in ("100MiB", "16GiB")] == [1, 0]
    _, found = ask("plan", *big, "plan.device_memory=100MiB")
    assert found["would_run"] is found["fits"] is False and found["findings"][0]["kind"] == "memory"


def test_plan_reports_what_would_fail(ask):
    words = ("train.check=true", *OWN_TASK)
    assert ask(*words)[0] == 0
    os.environ["BREAK"] = "1"
    try:
        code, found = ask(*words)
    finally:
        del os.environ["BREAK"]
    assert code == 1 and "ZeroDivisionError" in found["error"]


def test_what_there_is_to_choose(ask):
    """The devices; the values of a key, from the schema; all keys, as text."""
    code, found = ask("devices")
    assert code == 0 and found["auto"]["device"] in [each["device"] for each in found["devices"]]
    code, found = ask("schema", "--output", "schema.json")
    kinds = json.loads(Path(found["output"]).read_text())["definitions"]["train"]["properties"]["precision"]
    assert {"fp32", "bf16"} <= set(json.loads(json.dumps(kinds))["anyOf"][0]["enum"])
    assert "num_epochs: 10" in ask("--cfg", "job")[1]["text"]


def test_where_the_pages_are(ask, monkeypatch):
    monkeypatch.setattr(commands, "_become", lambda *_: 0)
    Path("a.db").touch()
    code, found = ask("ui", "tracking.uri=sqlite:///a.db")
    assert code == 0 and found["page"].startswith(found["url"])
    assert "python -m runner ui" in ask("ui", "--help")[1]["text"]

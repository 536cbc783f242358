"""Twenty tasks for a script or an agent that reads only --json and exit codes."""

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


def mended(found, words):
    """Replace each refused word by its first suggestion."""
    instead = {problem["asked"]: problem["suggestions"][0] for problem in found["faults"]}
    return [instead.get(word, word) for word in words]


def test_1_two_misspelled_keys(ask):
    words = [*RUN, "optimzer.lr=0.01", "train.num_epoch=1"]
    code, found = ask(*words)
    assert code == 2 and len(found["faults"]) == 2
    code, found = ask(*mended(found, words))
    assert code == 0 and found["num_epochs"] == 1


def test_2_a_device_that_is_not_there(ask):
    words = [*RUN[:-1], "device=cuda:99"]
    code, found = ask(*words)
    assert code == 2
    code, found = ask(*mended(found, words))
    assert (code, found["device"]) == (0, "cpu")


def test_3_a_value_of_the_wrong_kind(ask):
    words = [*RUN, "train.precision=half"]
    code, found = ask(*words)
    assert code == 2 and "bf16" in found["faults"][0]["so"] + found["faults"][0]["write"]


def test_4_a_misspelled_command(ask, trained):
    code, found = ask("histroy", trained["folder"])
    assert code == 2
    ((line,),) = (problem["suggestions"] for problem in found["faults"])
    assert ask(*shlex.split(line)[3:])[0] == 0


def test_5_interrupted_run_is_resumed(ask):
    code, found = ask(*RUN, "train.max_seconds=1e-6")
    assert (code, found["ending"]) == (0, "max_seconds")
    code, after = ask("resume", found["folder"], "train.max_seconds=null")
    assert (code, after["ending"], after["folder"]) == (0, "finished", found["folder"])
    assert after["num_steps"] > found["num_steps"]


def test_6_nothing_to_resume(ask, tmp_path):
    with inside(tmp_path):
        assert [ask(verb)[0] for verb in ("resume", "reproduce", "report", "history", "sync", "try")] == [2] * 6


def test_7_best_job_of_sweep_is_evaluated(ask, swept):
    best = swept["jobs"][0]
    code, found = ask("evaluate", str(Path(swept["folder"], best["folder"])))
    assert code == 0 and found["metrics"]["val/loss"] == pytest.approx(best["best"]["value"], rel=1e-5)


def test_8_models_are_compared_with_interval(ask, swept):
    code, found = ask("compare", f"{swept['folder']}:model=mlp", f"{swept['folder']}:model=linear", "metric=val/loss")
    (one,) = found["comparisons"]
    assert code == 0 and one["difference"]["n"] == 8
    assert one["verdict"] == "better" and one["difference"]["high"] < 0 < one["difference"]["p_value"] < 0.05


def test_9_a_metric_that_is_not_there(ask, swept):
    sides = [f"{swept['folder']}:model=mlp", f"{swept['folder']}:model=linear"]
    code, found = ask("compare", *sides, "metric=test/acuracy")
    assert code == 2
    code, found = ask("compare", *sides, found["faults"][0]["suggestions"][0])
    assert code == 0 and found["comparisons"][0]["metric"] == "test/accuracy"


def test_10_failed_job_is_fixed(ask, monkeypatch):
    words = ["-m", *OWN_TASK, "optimizer.lr=0.01,0.02", "sweep.batch=off"]
    monkeypatch.setenv("BREAK", "1")
    code, found = ask(*words, "hydra.sweep.dir=multirun/broken/sweep")
    assert code == 1 and [job["state"] for job in found["jobs"]] == ["failed"] * 2
    assert all("ZeroDivisionError" in job["error"] for job in found["jobs"])
    monkeypatch.delenv("BREAK")
    code, found = ask(*words, f"sweep.resume={found['folder']}", "sweep.retry=true")
    assert code == 0 and [job["state"] for job in found["jobs"]] == ["finished"] * 2


def test_11_where_it_became_nan(ask):
    code, found = ask(*OWN_TASK, "task.function._target_=own.explodes")
    assert (code, found["status"]) == (1, "failed") and "train/loss is inf at step 1" in found["error"]
    code, points = ask("history", found["folder"])
    assert code == 0 and points["metrics"]["train/loss"]["first"] is None
    code, found = ask(*OWN_TASK)
    assert (code, found["status"]) == (0, "finished")


def test_12_the_step_with_the_least_loss(ask, trained):
    code, found = ask("history", trained["folder"], "--output", "points.csv")
    assert code == 0
    with Path(found["output"]).open() as stream:
        points = [
            (float(row["value"]), int(row["step"])) for row in csv.DictReader(stream) if row["metric"] == "val/loss"
        ]
    assert min(points)[1] == trained["best"]["step"]


def test_13_answers_for_new_rows(ask, trained):
    code, found = ask("predict", trained["folder"])
    flags = [flag for problem in found["faults"] for flag in problem["asked"].split() if flag.startswith("--")]
    assert code == 2 and flags == ["--input", "--output"]
    words = ("predict", trained["folder"], "--input", "new.csv", "--output", "answers.csv")
    for columns in (["a", "b"], None):
        columns = columns or re.findall(r"'([^']+)'", found["faults"][0]["so"].partition(";")[0])
        Path("new.csv").write_text("\n".join([",".join(columns), *[",".join("1" for _ in columns)] * 2]) + "\n")
        code, found = ask(*words)
    assert code == 0 and len(Path("answers.csv").read_text().splitlines()) == 3


def test_14_a_format_that_is_not_there(ask, trained):
    code, found = ask("export", trained["folder"], "--format", "safetensor")
    assert code == 2
    code, found = ask("export", trained["folder"], *shlex.split(found["faults"][0]["suggestions"][0]))
    assert code == 0 and Path(found["path"]).is_file()


def test_15_would_it_fit(ask):
    big = [*RUN, "device=cuda:0", "model=mlp", "model.hidden_sizes=[4000,4000]"]
    assert [ask("plan", *big, f"plan.device_memory={size}")[0] for size in ("100MiB", "16GiB")] == [1, 0]
    _, found = ask("plan", *big, "plan.device_memory=100MiB")
    assert found["would_run"] is found["fits"] is False and found["findings"][0]["kind"] == "memory"


def test_16_a_learning_rate_to_begin_with(ask):
    code, found = ask("lr-find", *RUN, "--steps", "20")
    assert code == 0 and found["suggested"] is not None
    code, found = ask(*RUN, f"optimizer.lr={found['suggested']}")
    assert (code, found["status"]) == (0, "finished")


def test_17_is_it_the_same_again(ask, trained):
    code, found = ask("reproduce", trained["folder"])
    assert (code, found["is_same"]) == (0, True) and found["metrics"]["val/loss"] == trained["metrics"]["val/loss"]


def test_18_plan_reports_what_would_fail(ask):
    words = ("train.check=true", *OWN_TASK)
    assert ask(*words)[0] == 0
    os.environ["BREAK"] = "1"
    try:
        code, found = ask(*words)
    finally:
        del os.environ["BREAK"]
    assert code == 1 and "ZeroDivisionError" in found["error"]


def test_19_what_there_is_to_choose(ask):
    """The devices; the values of a key, from the schema; all keys, as text."""
    code, found = ask("devices")
    assert code == 0 and found["auto"]["device"] in [each["device"] for each in found["devices"]]
    code, found = ask("schema", "--output", "schema.json")
    kinds = json.loads(Path(found["output"]).read_text())["definitions"]["train"]["properties"]["precision"]
    assert {"fp32", "bf16"} <= set(json.loads(json.dumps(kinds))["anyOf"][0]["enum"])
    assert "num_epochs: 10" in ask("--cfg", "job")[1]["text"]


def test_20_where_the_pages_are(ask, monkeypatch):
    monkeypatch.setattr(commands, "_become", lambda *_: 0)
    Path("a.db").touch()
    code, found = ask("ui", "tracking.uri=sqlite:///a.db")
    assert code == 0 and found["page"].startswith(found["url"])
    assert "python -m runner ui" in ask("ui", "--help")[1]["text"]

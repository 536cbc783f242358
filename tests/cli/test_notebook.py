"""run() in a notebook's cells, in one process: a class of a cell, an edited module, the result, an interrupt."""

import logging
import os
import runpy
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from waiting import LONGEST

import runner
from runner.config import instantiate
from runner.errors import RunnerError
from runner.experiment.summary import Summary
from runner.tracking.journal import Journal
from runner.version import PACKAGES

CELLS = """
import json, os, sys, threading, time
from pathlib import Path
from torch import nn
from runner import run

class Net(nn.Sequential):
    def __init__(self, i, o):
        super().__init__(nn.Flatten(), nn.Linear(i, o))

WORDS = ["device=cpu", "data.limit=300", "train.num_steps=8", "tracking.uri=sqlite:///runs.db", "tracking.system_metrics=false"]
OWN = ["~model", "+model.i=${facts.in_features}", "+model.o=${facts.out_features}"]
of_a_cell = run([*WORDS, *OWN, "+model._target_=__main__.Net"])
history = of_a_cell.history
found = {
    "status": of_a_cell["status"],
    "folder": [of_a_cell["folder"], str(of_a_cell.folder)],
    "run_id": of_a_cell["run_id"],
    "steps": history.index.tolist(),
    "last": float(history["train/loss"].iloc[-1]) == of_a_cell["metrics"]["train/loss"],
    "columns": sorted(history.columns),
    "picture": of_a_cell._repr_png_()[:4] == b"\\x89PNG",
}

found["again"] = run([*WORDS, "model=linear", "tracking.enabled=false"], folder="again")["num_steps"]
found["over"] = run([*WORDS, "model=linear", "tracking.enabled=false"], folder="again")["num_steps"]
print("FOUND", json.dumps(found), flush=True)
try:
    run(["device=cpu", "model=linear", "train.num_epochs=1000000", "tracking.enabled=false"], folder="long")
    print("WENT ON", flush=True)
except KeyboardInterrupt:
    print("INTERRUPTED", json.loads(Path("long/summary.json").read_text())["status"], flush=True)
"""


@pytest.mark.slow
def test_the_cells_of_a_notebook(own_folder, warm):
    import json

    from mlflow import MlflowClient

    Path("cells.py").write_text(CELLS)
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "MLFLOW_DISABLE_TELEMETRY": "true"}
    process = warm.program(
        [sys.executable, "cells.py"], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    try:
        deadline = time.monotonic() + LONGEST
        while not Path("long/checkpoints/best.pt").exists():
            assert process.poll() is None and time.monotonic() < deadline, process.stdout.read()
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        said = process.communicate(timeout=LONGEST)[0]
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, said
    (line,) = [line for line in said.splitlines() if line.startswith("FOUND ")]
    found = json.loads(line.removeprefix("FOUND "))
    assert found["status"] == "finished" and found["folder"][0] == found["folder"][1]
    assert found["steps"] == list(range(1, 9)) and found["last"] and found["picture"]
    assert {"train/loss", "val/loss", "test/accuracy", "train/lr"} <= set(found["columns"])
    assert found["again"] == found["over"] == 8
    assert "has finished" in said and "INTERRUPTED killed" in said and "WENT ON" not in said
    assert "can't" not in said and "Traceback" not in said, said
    model = MlflowClient(f"sqlite:///{own_folder}/runs.db").get_run(found["run_id"])
    assert model.info.status == "FINISHED"


def test_class_of_python_m_program_is_refused(monkeypatch):
    module = sys.modules["__main__"]
    monkeypatch.setattr(module, "Net", type("Net", (), {"__module__": "__main__"}), raising=False)
    monkeypatch.setattr(module, "__spec__", None)
    assert instantiate.locate("__main__.Net").__name__ == "Net"
    for name in ("__main__.sys", "__main__.__builtins__", "__main__.Net.__init__"):
        with pytest.raises(RunnerError):
            instantiate.locate(name)
    with pytest.raises(RunnerError):
        instantiate.locate("__main__.Net", own_code=False)
    monkeypatch.setattr(module, "__spec__", type(sys.__spec__)("runner.experiment.rank", None))
    with pytest.raises(RunnerError):
        instantiate.locate("__main__.Net")


def test_script_imported_by_worker_does_not_train(own_folder):
    (own_folder / "script.py").write_text("from runner import run\nrun(['model=linear'])\n")
    with pytest.raises(RunnerError, match="each would begin a run") as caught:
        runpy.run_path("script.py", run_name="__mp_main__")
    assert "__main__" in caught.value.problems[0].help
    assert [path.name for path in own_folder.iterdir()] == ["script.py"]


def test_run_takes_one_run(own_folder):
    with pytest.raises(RunnerError, match="one run"):
        runner.run(["-m", "seed=1,2"])
    for word in ("seed=1,2", "device=cpu,0", "model.hidden_sizes=[64],[32,32]", "sweep.zip={seed:[1,2],name:[a,b]}"):
        with pytest.raises(RunnerError, match="this is one run") as raised:
            runner.run([word])
        assert "-m" not in str(raised.value)
    with pytest.raises(RunnerError) as raised:  # the line is split, and has one error
        runner.run("seed=1 modle='mlp'")
    assert [problem.source for problem in raised.value.problems] == ["modle=mlp"]
    for words in (["-cd"], ["-cn", ""]):
        with pytest.raises(RunnerError, match="needs a value"):
            runner.run(words)
    before = dict(os.environ)
    with pytest.raises(RunnerError, match="no key"):
        runner.run(["--allow", "json", "modle=1"])
    assert dict(os.environ) == before


def test_run_points_are_readable_after_chdir(own_folder, monkeypatch, write):
    def leave(cfg, folder, context):
        with Journal(folder) as journal:
            write.start(journal)
            write.rows(journal, 1, 3)
        return Summary("finished")

    monkeypatch.setattr("runner.experiment.run.run", leave)
    result = runner.run(["model=linear", "device=cpu"], folder="below")
    assert len(result.history) == 3
    (own_folder / "elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert len(result.history) == 3


def test_ctrl_c_before_training_leaves_nothing(own_folder, monkeypatch):
    def interrupted(cfg, folder, context):
        logging.getLogger("runner").warning("built")
        raise KeyboardInterrupt

    monkeypatch.setattr("runner.experiment.run.run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        runner.run(["model=linear", "device=cpu"], folder="below")
    assert not list(own_folder.iterdir())

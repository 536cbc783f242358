"""--json: stdout is one JSON document for every command; the rest is on stderr."""

import json
import os
import re
import socket
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from runner import cli
from runner.cli import commands, table
from runner.cli.answer import as_json, give
from runner.errors import SECRETS
from runner.version import PACKAGES

#: of an error
KEYS = {"code", "message", "help", "suggestions", "notes", "asked", "so", "write"}
SHORT = ("model=linear", "data=iris", "train.num_epochs=1", "tracking.enabled=false", "device=cpu", "task.plots=false")


@pytest.fixture
def answer(own_folder, capfd):
    """Run a command with --json. Returns its exit code, the answer, and the text for users."""

    def run(*words, place=0):
        capfd.readouterr()
        code = cli.main([*words[:place], "--json", *words[place:]])
        out, said = capfd.readouterr()
        return code, json.loads(out), said

    return run


def test_a_run_and_what_follows_it(answer):
    code, found, said = answer(*SHORT)
    assert (code, found["status"], found["num_epochs"]) == (0, "finished", 1)
    assert "epoch" in said and found["best"]["metric"] == "val/loss"
    assert answer("resume", found["folder"])[1] == found  # it has finished
    code, longer, _ = answer("resume", found["folder"], "train.num_epochs=2", place=1)
    assert (code, longer["num_epochs"], longer["folder"]) == (0, 2, found["folder"])
    code, again, said = answer("reproduce", found["folder"], place=2)
    assert code == 0 and again["is_same"] is True and again["folder"] != found["folder"] and "train/loss" in said
    looks = {
        ("watch", found["folder"]): {"status", "step", "num_steps", "goal", "metrics"},
        ("diff", found["folder"], again["folder"]): {"runs", "configuration", "made_with", "curves", "sentence"},
        ("explain", found["folder"], "--time"): {"time", "step"},
    }
    for words, keys in looks.items():
        code, seen, _ = answer(*words)
        assert code == 0 and seen.keys() >= keys, words
    code, measured, _ = answer("evaluate", found["folder"])
    assert measured["metrics"]["test/loss"] == pytest.approx(longer["metrics"]["test/loss"])
    code, exported, _ = answer("export", found["folder"], "--format", "safetensors")
    assert (code, exported["format"]) == (0, "safetensors") and exported["path"].endswith("model.safetensors")


def test_what_cant_be_run(answer):
    code, found, said = answer("modle=mlp", "device=cuda:99", "sed=1")
    assert code == 2 and said.endswith("error: 3 problems found; nothing was started\n")
    assert {each["code"]: each["suggestions"] for each in found["faults"]} == {
        "unknown-key": ["seed=1"],
        "missing-device": ["device=cpu"],
    }
    assert all(set(problem) == KEYS for problem in found["faults"])
    code, found, _ = answer(*SHORT, "device=cuda:99")
    assert code == 2 and found["faults"][0]["asked"] == "device=cuda:99"
    for words in (("evaluate", "nowhere"), ("watch", "last"), ("diff", "last", "nowhere"), ("tune", "modle=mlp")):
        code, found, said = answer(*words)
        assert code == 2 and found.keys() == {"faults"}
        assert all(each["help"] in said and each["message"] in said for each in found["faults"])


def test_answer_reports_all_errors_at_once(answer):
    words = ["train.num_epochs=-1", "model.dropout=2", "optimizer.lr=abc", "train.cuda_graph=true", "device=cpu"]
    code, found, said = answer(*words)
    assert code == 2 and said.endswith("error: 4 problems found; nothing was started\n")
    typed = {each["asked"]: each["suggestions"][0] for each in found["faults"]}
    assert typed == {
        "train.num_epochs=-1": "train.num_epochs=1",
        "train.cuda_graph=true": "train.cuda_graph=false",
        "model.dropout=2": "model.dropout=0.1",
        "optimizer.lr=abc": "optimizer.lr=0.001",
    }


@pytest.mark.parametrize(
    "words",
    [
        ["train.num_epochs=1,2", "seed=-1"],
        ["scheduler.gamma=1", "seed=-1"],
        ["train.num_steps=0", "optimizer.eps=-1"],
        ["train.early_stopping.mode=min", "optimizer.eps=-1"],
    ],
)
def test_error_hides_no_other_error(words, answer):
    code, found, _ = answer(*(f"+{word}" if word.startswith("scheduler") else word for word in words))
    assert code == 2 and {each["asked"] for each in found["faults"]} == set(words)


def test_what_is_not_a_number_is_null(answer, own_folder):
    (own_folder / "own.py").write_text("def loss(model, batch):\n    return model(batch[0]).sum() * float('nan')\n")
    _, found, _ = answer(
        *SHORT[:-1], "task=own", "task.function._target_=own.loss", "train.num_steps=1", "placement.guard=off"
    )
    assert found["num_steps"] == 1 and found["metrics"]["train/loss"] is None


def test_configuration_is_an_answer(answer):
    assert answer("--cfg", "job")[1]["text"].startswith("device: auto")
    assert answer("--cfg=job")[1]["text"].startswith("device: auto")


def test_help_lists_every_command(answer):
    text = answer("--help")[1]["text"]
    assert set(table.COMMANDS) <= set(re.findall(r"^  ([\w-]+)  +", text, re.MULTILINE))
    assert "dropout" not in text and len(text.splitlines()) < 70  # not a list of all keys


def test_password_is_masked_only_in_texts(monkeypatch, capsys):
    monkeypatch.setenv("TRACK_PW", 'pä"1')
    monkeypatch.setenv("TRACK_NUMBER", "1234")
    monkeypatch.setenv(SECRETS, "TRACK_PW,TRACK_NUMBER")
    with as_json():
        give({"points": 51234, "at 1234": ["http://a:1234@host", 'it is pä"1'], "folder": Path("1234")})
    found = json.loads(capsys.readouterr().out)
    said = ["http://a:<oc.env:TRACK_NUMBER>@host", "it is <oc.env:TRACK_PW>"]
    assert found == {"points": 51234, "at 1234": said, "folder": "<oc.env:TRACK_NUMBER>"}


def test_stopped_command_has_exit_code(answer, monkeypatch):
    def stopped(given):
        raise KeyboardInterrupt

    monkeypatch.setitem(table.COMMANDS, "devices", replace(table.COMMANDS["devices"], function=stopped))
    assert answer("devices")[:2] == (130, {"exit_code": 130})


@pytest.mark.slow
def test_json_sweep_process_prints_one_document(own_folder):
    """Jobs inherit the file descriptor of stdout, not Python's sys.stdout."""
    words = [*SHORT, "-m", "seed=1,2", "hydra.sweep.dir=s", "--json"]
    command, environment = [sys.executable, "-m", "runner", *words], {**os.environ, "PYTHONPATH": str(PACKAGES)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert [job["state"] for job in found["jobs"]] == ["finished"] * 2 and found["folder"] == str(own_folder / "s")
    assert "report" in done.stderr


def test_page_takes_free_port(own_folder, capfd, monkeypatch):
    """On a Mac, AirPlay uses port 5000."""
    became = []
    Path("a.db").touch()
    monkeypatch.setattr(commands, "_become", lambda command, environment: became.append(command) or 0)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(commands, "PORT", port)
        assert cli.main(["ui", "tracking.uri=sqlite:///a.db", "--json"]) == 0
    found = json.loads(capfd.readouterr().out)
    assert found["url"] == f"http://127.0.0.1:{became[0][-1]}" and int(became[0][-1]) > port
    for words in (["--port", "5077"], ["--port=5077"]):
        assert cli.main(["ui", "tracking.uri=sqlite:///a.db", *words]) == 0
        assert became[-1][-1] == "5077"

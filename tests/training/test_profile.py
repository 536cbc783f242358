"""`train.profile=N`: the traced steps, the files, and a training that tracing does not change."""

import gzip
import json
import os
from pathlib import Path

import pytest

from runner import cli
from runner.tracking.journal_reader import read_events, read_points

WORDS = ("model=mlp", "model.hidden_sizes=[8]", "task.plots=false", "tracking.enabled=false", "hydra.run.dir=run")


def steps_in(file):
    events = json.loads(gzip.decompress(Path(file).read_bytes()))["traceEvents"]
    spans = [event for event in events if event.get("cat") == "user_annotation" and event["name"].startswith("step ")]
    spans = [(event["ts"], event["ts"] + event["dur"], event["name"]) for event in spans]
    matmuls = [event["ts"] for event in events if event.get("name") == "aten::addmm"]
    return sorted({int(name.split()[1]) for begin, end, name in spans if any(begin <= ts <= end for ts in matmuls)})


@pytest.mark.parametrize(
    ("words", "steps"),
    [
        (("train.profile=4", "train.num_steps=20"), [11, 12, 13, 14]),
        (("train.profile=4", "train.num_steps=6"), [3, 4, 5, 6]),
        (("train.profile=9", "train.num_steps=3"), [1, 2, 3]),
    ],
)
def test_the_steps_that_are_traced(own_folder, capfd, words, steps):
    assert cli.main([*WORDS, *words]) == 0
    out, err = capfd.readouterr()
    assert f"profile: steps {steps[0]} to {steps[-1]} are in profile/trace.json.gz" in out
    assert "USDT" not in out + err and "KINETO_LOG_LEVEL" not in os.environ
    assert steps_in("run/profile/trace.json.gz") == steps
    assert "aten::addmm" in Path("run/profile/operations.txt").read_text()
    assert [event["path"] for event in read_events(Path("run")) if event["kind"] == "artifact"][-1] == "profile"
    if steps[0] == 11:  # the same training as without tracing
        assert cli.main([*WORDS[:-1], "hydra.run.dir=plain", "train.num_steps=20"]) == 0
        assert read_points(Path("plain"))["train/loss"] == read_points(Path("run"))["train/loss"]
        assert not Path("plain/profile").exists()

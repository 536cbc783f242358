"""The table of conf/README.md for those who come from lightning-hydra-template: each command runs, and does what the row says."""

import json
import shlex
from pathlib import Path

import pytest

from runner import cli
from runner.tracking.journal import read_points
from runner.version import PACKAGES

TABLE = (PACKAGES / "conf/README.md").read_text().partition("## From lightning-hydra-template")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:3]] for line in TABLE.splitlines() if line.startswith("|")][2:]
SMALL = ["model.hidden_sizes=[8]", "task.plots=false"]
#: commands that go on with another, whose words are not of a run
ON_A_RUN = ("resume", "evaluate")


def groups():
    """Of each row the commands: a row that says nothing on its left belongs to the one above."""
    found = {}
    for there, here in ROWS:
        name = there or name
        found.setdefault(name, []).append(shlex.split(here.strip("`"))[3:])
    return found


def newest(pattern):
    return max(Path().glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def summary():
    return json.loads(newest("outputs/*/*/summary.json").read_text())


def points(name):
    return [step for step, _ in read_points(newest("outputs/*/*/summary.json").parent)[name]]


def jobs():
    return [json.loads(path.read_text()) for path in newest("multirun/*/*").glob("*/summary.json")]


def checked():
    """A check leaves a run that is over after two steps."""
    assert summary()["num_steps"] == 2


def gone_on():
    found = summary()
    kept = {path.name for path in Path(found["folder"], "checkpoints").iterdir()}
    assert found["num_epochs"] == 2 and {"last.pt", "step-12.pt", "step-24.pt"} <= kept
    assert points("val/loss") == [12, 24]


def evaluated():
    folder = Path(summary()["folder"])
    assert json.loads((folder / "evaluation.json").read_text())["test"]["accuracy"] == pytest.approx(
        summary()["final"]["test/accuracy"], abs=1e-6
    )


def of_sweep(num, **what):
    def found():
        each = jobs()
        assert len(each) == num and all(one["status"] in ("finished", "pruned") for one in each)
        for name, value in what.items():
            assert all(one[name] == value for one in each)

    return found


SHOWN = {
    "`trainer.fast_dev_run=true` on the CPU": checked,
    "... on a GPU": checked,
}


@pytest.mark.slow
@pytest.mark.parametrize("there", groups())
def test_what_the_other_can_is_a_command_here(there, own_folder, warm_jobs, request):
    for words in groups()[there]:
        if words[0] in ON_A_RUN:
            assert cli.main(words) == 0
            continue
        device = str(request.getfixturevalue("device"))
        words = [word.replace("device=cuda:0", f"device={device}") for word in words]
        if device == "cpu":
            words = [word.replace("precision=fp16", "precision=bf16") for word in words]
        assert cli.main([*words, *SMALL]) == 0
    SHOWN[there]()

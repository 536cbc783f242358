"""The table of conf/README.md for users of lightning-hydra-template: each command runs, and does what its row says."""

import json
import shlex
from pathlib import Path

import pytest

from runner.tracking.journal import read_points
from runner.version import PACKAGES

TABLE = (PACKAGES / "conf/README.md").read_text().partition("## From lightning-hydra-template")[2].partition("\n## ")[0]
ROWS = [[cell.strip() for cell in line.split("|")[1:3]] for line in TABLE.splitlines() if line.startswith("|")][2:]
QUIET = ["task.plots=false", "tracking.enabled=false"]
SMALL = ["model=mlp", "model.hidden_sizes=[8]", *QUIET]


def commands():
    """Return the commands by row; a row with an empty left cell belongs to the row above."""
    found, name = {}, ""
    for there, here in ROWS:
        name = there or name
        found.setdefault(name, []).append(shlex.split(here.strip("`"))[3:])
    return found


def newest(pattern):
    return max(Path().glob(pattern), key=lambda path: path.stat().st_mtime_ns)


def run():
    """Return the newest run's directory and summary."""
    path = newest("outputs/*/*/summary.json")
    return path.parent, json.loads(path.read_text())


def steps_of(name):
    return [step for step, _ in read_points(run()[0])[name]]


def jobs():
    return [json.loads(path.read_text()) for path in newest("multirun/*/*").glob("*/summary.json")]


def checked(said):
    assert "check: everything works" in said and not Path("outputs").exists()


def half(_):
    assert run()[1]["status"] == "finished" and run()[1]["num_steps"] == 12


def validated_twice(_):
    assert steps_of("val/loss") == [6, 12]


def shared(_):
    assert run()[1]["num_processes"] == 2 and run()[1]["num_epochs"] == 2


def gone_on(_):
    kept = {path.name for path in (run()[0] / "checkpoints").iterdir()}
    assert {"last.pt", "step-12.pt", "step-24.pt"} <= kept and "step-36.pt" not in kept
    first, second = (value for _, value in read_points(run()[0])["val/loss"])
    assert second < first


def evaluated(_):
    folder, summary = run()
    found = json.loads((folder / "evaluation.json").read_text())
    assert found["metrics"]["test/accuracy"] == pytest.approx(summary["metrics"]["test/accuracy"], abs=1e-6)


def swept(num, **what):
    def shown(_):
        found = jobs()
        assert len(found) == num and {job["status"] for job in found} <= {"finished", "pruned", "skipped"}
        assert all(job[name] == value for job in found for name, value in what.items())

    return shown


def tracked(_):
    swept(2, num_processes=2)(_)
    assert len({job["run_id"] for job in jobs()} - {None}) == 2


def planned(said):
    assert "verdict   would run" in said


def learnt_by_heart(_):
    assert read_points(run()[0])["train/accuracy"][-1][1] == 1.0


def limited(_):
    assert run()[1]["num_epochs"] == 3 and run()[1]["num_samples"] <= 300


def profiled(_):
    assert (run()[0] / "profile").is_dir()


NUM_EXPERIMENTS = len(list((PACKAGES / "conf/experiment").glob("*.yaml")))
#: by row: overrides that make its command smaller, and the check that it did what the row says
SHOWN = {
    "`trainer.fast_dev_run=true` on the CPU": (["model=mlp"], checked),
    "... on a GPU": (["model=mlp"], checked),
    "an epoch in half precision": (SMALL, half),
    "`val_check_interval=0.5`": (SMALL, validated_twice),
    "DDP of two processes on the CPU": (SMALL, shared),
    "a checkpoint of each epoch, then an epoch more": (SMALL, gone_on),
    "training, then eval.py": (SMALL, evaluated),
    # composed and checked, as there is no such device here; tests/whole_runs/test_conf.py trains each
    "each experiment, for a moment": ([*QUIET[1:], "device=cuda:7"], swept(NUM_EXPERIMENTS, status="skipped")),
    "a sweep, for a moment": (SMALL, swept(2, num_steps=2)),
    "a sweep of runs with DDP": ([*SMALL, "train.num_epochs=1"], swept(3, num_processes=2)),
    "Optuna": ([*SMALL, "hydra.sweeper.n_trials=2", "train.num_epochs=1"], swept(2)),
    "Optuna over runs with DDP, tracked": (
        [*SMALL[:-1], "tracking.log_model=false", "hydra.sweeper.n_trials=2", "train.num_epochs=1"],
        tracked,
    ),
    "that every part can be built": ([], planned),
    "`debug=overfit`": (QUIET, learnt_by_heart),
    "`debug=limit`": (SMALL, limited),
    "`debug=profiler`": (SMALL, profiled),
}


def test_each_row_is_shown():
    assert list(SHOWN) == list(commands())


@pytest.mark.slow
@pytest.mark.parametrize("there", list(commands()))
def test_template_features_are_commands_here(there, own_folder, warm, device, monkeypatch):
    Path("tests").symlink_to(PACKAGES / "tests")  # a recipe reads a text of this repository
    smaller, shown = SHOWN[there]
    for words in commands()[there]:
        if "train.num_processes=2" in words:  # `auto` chooses the CPU, which allows two processes
            monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
        words = [word.replace("device=cuda:0", f"device={device}") for word in words]
        if device.type == "cpu":
            words = [word.replace("precision=fp16", "precision=bf16") for word in words]
        more = smaller if words[0] not in ("resume", "evaluate") else []
        with warm.command(own_folder, *words, *more) as command:
            said, _ = command.communicate()
        assert command.returncode == 0, said
    shown(said)

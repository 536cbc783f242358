import json
import re
import signal
import sys

import pytest
from hydra.core.hydra_config import HydraConfig

from runner.config import compose
from runner.config.trust import check_folder
from runner.device import Choice
from runner.experiment import run
from runner.experiment.context import Membership, RunContext
from runner.sweep.jobs import run_together
from runner.sweep.jobs.run_job import task
from runner.sweep.launchers.slurm import link_console

MEMBER = RunContext(member=Membership("multirun/ä b", "uid", "digits", "model=mlp seed='1'", publishes=False))


def test_link_console_makes_hard_link(tmp_path):
    for number, output in enumerate(("first", "second")):  # a job that is resumed has another log
        log = tmp_path / f"{number}.log"
        log.write_text(output)
        link_console(log, tmp_path / "0")
        assert (tmp_path / "0/console.log").read_text() == output
    check_folder(tmp_path / "0")
    (own := tmp_path / "1" / "console.log").parent.mkdir()
    own.write_text("own")
    link_console(log, own.parent)
    assert own.read_text() == "own"


def test_task_with_system_exit_fails(own_folder, monkeypatch, capfd):
    def end(cfg, folder, *, context):
        sys.exit()

    cfg = compose.composer([])(["tracking.enabled=false"])
    cfg.hydra.runtime.output_dir = str(own_folder)
    HydraConfig.instance().set_config(cfg)
    monkeypatch.setattr(run, "run", end)
    del cfg.hydra
    assert task(cfg, context=MEMBER).code == 1
    summary = json.loads((own_folder / "summary.json").read_text())
    assert summary["status"] == "failed" and summary["error"].startswith("SystemExit: it would end the program")
    assert "Traceback" in capfd.readouterr().err


def test_task_error_is_in_summary(own_folder, capfd):
    cfg = compose.composer([])(["data=arrays", "data.path=nowhere.npz", "tracking.enabled=false", "model=mlp"])
    cfg.hydra.runtime.output_dir = str(own_folder / "3")
    HydraConfig.instance().set_config(cfg)
    (own_folder / "3").mkdir()
    del cfg.hydra
    summary = task(cfg, context=MEMBER)
    assert vars(summary) | {"hints": []} == json.loads((own_folder / "3/summary.json").read_text())
    assert summary.status == "failed" and "nowhere.npz" in summary.error and "help:" in summary.error
    assert "help:" in capfd.readouterr().out


@pytest.mark.parametrize(("is_stopped", "num"), [(True, 3), (False, 4)])
def test_in_turns_after_signal_starts_nothing(tmp_path, monkeypatch, is_stopped, num):
    """27 rows in 4 folds: three of 7 rows train together, then the one of 6."""
    fit, jobs = run_together.fit_together, []
    compose_run = compose.composer([])
    for fold in range(4):
        words = ["data=iris", "data.limit=30", f"data.fold={fold}/4", "model=linear", "device=cpu", "sweep.batch=4"]
        cfg = compose_run([*words, "tracking.enabled=false", "task.plots=false", "train.num_steps=9"])
        del cfg.hydra
        (folder := tmp_path / str(fold)).mkdir()
        jobs.append(run_together.PlannedRun(cfg, folder, RunContext(device=Choice("cpu", "as asked", "cpu"))))

    def stopped(*arguments, **more):
        signal.raise_signal(signal.SIGTERM)
        return fit(*arguments, **more)

    if is_stopped:
        monkeypatch.setattr(run_together, "fit_together", stopped)
    codes = [summary.code for summary in run_together.in_turns(jobs)]
    logs = [file.read_text() for fold in range(4) if (file := tmp_path / str(fold) / "console.log").exists()]
    assert codes == [143 if is_stopped else 0] * (3 if is_stopped else 4)
    assert len([*tmp_path.glob("*/checkpoints")]) == len([*tmp_path.glob("*/summary.json")]) == num
    if not is_stopped:
        assert sorted(re.search(r": (\d+) train", log)[1] for log in logs) == ["20"] * 3 + ["21"]
        assert [sum(f"of {size} jobs compute together" in log for log in logs) for size in (3, 1)] == [3, 1]

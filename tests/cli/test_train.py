"""The arguments that `train` passes to the run that it starts."""

from runner import cli
from runner.config.compose import composer
from runner.experiment import check
from runner.tools.plan.command import print_what_fits


def test_run_probes_machine_once(own_folder, monkeypatch):
    looked, probe = [], check.probe
    monkeypatch.setattr(check, "probe", lambda: looked.append(1) or probe())
    words = ["model=linear", "device=cpu", "data.limit=200", "train.num_steps=1", "task.plots=false"]
    assert cli.main([*words, "tracking.enabled=false"]) == 0
    assert len(looked) == 1


def test_check_without_possible_plan_says_so(capsys):
    cfg = composer([])(["device=cpu", "train.batch_size=0"])
    print_what_fits(cfg)
    assert "not known" in capsys.readouterr().out

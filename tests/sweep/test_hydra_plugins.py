"""The Hydra launchers and sweepers that a sweep works with."""

from __future__ import annotations

from omegaconf import OmegaConf

from runner import cli
from runner.config import compose
from runner.sweep.hydra_plugins import part_problems

LAUNCHERS = "use `hydra/launcher=slots`, `hydra/launcher=ray` or `hydra/launcher=slurm`"
SWEEPERS = "use `hydra/sweeper=grid` or `hydra/sweeper=optuna`"


def test_what_conf_and_submitit_offer_is_taken(own_folder):
    for launcher in ("slots", "ray", "slurm", "submitit_local", "submitit_slurm"):
        for sweeper in ("grid", "optuna"):
            cfg = compose.composer([])([f"hydra/launcher={launcher}", f"hydra/sweeper={sweeper}"])
            assert not part_problems(cfg.hydra), (launcher, sweeper)


def test_those_of_others_are_refused_both_at_once_with_what_to_write(own_folder, capfd):
    assert cli.main(["-m", "hydra/launcher=basic", "hydra/sweeper=basic", "seed=1,2"]) == 2
    told = capfd.readouterr().err
    for word in (
        "--> hydra/launcher=basic",
        "--> hydra/sweeper=basic",
        f"help: {LAUNCHERS}",
        f"help: {SWEEPERS}",
    ):
        assert word in told


def test_one_that_a_file_names_by_its_class_is_asked_about_by_its_key():
    joblib = "hydra_plugins.hydra_joblib_launcher.joblib_launcher.JoblibLauncher"
    parts = {"launcher": {"_target_": joblib}, "sweeper": {"_target_": "runner.sweep.Grid"}}
    (problem,) = part_problems(OmegaConf.create(parts))
    assert (problem.source, problem.help) == (f"hydra.launcher._target_={joblib}", LAUNCHERS)

"""The allowed values of ${...} in Hydra's settings: a text, and the same one later; and the allowed links in a run's directory."""

import pytest
from omegaconf import OmegaConf

from runner.config.trust import hydra_problems, strays

REST = {
    "run": {"dir": "outputs/1"},
    "runtime": {"output_dir": "???"},
    "job": {"num": "???", "name": "a", "env_set": {}},
    "sweep": {"dir": "multirun/1"},
}
OWN = {
    "number": 3,
    "way": "${number}",
    "group": {"now": {"class": "logging.NullHandler"}},
    "late": "${group.${kind}}",
    "kind": "now",
}


def problems(**hydra):
    cfg = OmegaConf.create({**OWN, "hydra": {**REST, **hydra}})
    return hydra_problems(cfg.hydra)


@pytest.mark.parametrize(
    "value",
    [
        "${hydra.runtime.output_dir}/log",
        "${hydra.runtime.output_dir}",
        "${hydra.sweep.dir}/.submitit/%j",
        "${hydra.job.num}",
        "${oc.env:NOWHERE,1}",
        "${now:%Y-%m-%d}",
        "${number}",
        "a ${number} and ${way}",
    ],
)
@pytest.mark.parametrize("part", ["launcher", "job_logging", "callbacks"])
def test_a_text_is_taken(part, value):
    assert problems(**{part: {"x": {"y": value}}}) == []


@pytest.mark.parametrize(
    "value",
    [
        "${group.now}",
        "${group}",
        "${late}",
        "${way}",
        "${group.${kind}}",
        "${group.${hydra.job.num}}",
        "${oc.select:group.now}",
        "${oc.select:${kind},none}",
        "${oc.${kind}:'{}'}",
        "${oc.dict.values:group}",
        "${hydra.callbacks.other}",
    ],
)
@pytest.mark.parametrize("part", ["launcher", "job_logging", "callbacks"])
def test_possible_group_references_are_refused(part, value):
    (problem,) = problems(**{"callbacks": {"other": {}}, part: {"other": {}, "x": value}})
    assert (problem.source, problem.code) == (f"hydra.{part}.x={value}", "untrusted")


def test_variables_are_set_to_texts():
    job = REST["job"]
    assert problems(job={**job, "env_set": {"OMP_NUM_THREADS": "${number}"}}) == []
    assert problems(job={**job, "env_set": "${group.${hydra.job.num}}"})
    assert problems(job={**job, "env_set": {"NCCL_DEBUG_FILE": "x"}})


def test_circular_links_are_refused(tmp_path):
    for name, to in (("a", "b"), ("b", "a"), ("c", "c"), ("inside", "nothing yet"), ("up", "..")):
        (tmp_path / name).symlink_to(to)
    assert [path.name for path, _ in strays(tmp_path)] == ["a", "b", "c", "up"]

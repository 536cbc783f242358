"""Every file in conf/ composes, says what it must, and runs."""

import json

import pytest

from runner import cli, compose, config

OPTIONS = sorted(
    f"{path.parent.relative_to(compose.CONF)}={path.stem}"
    for path in compose.CONF.rglob("*.yaml")
    if path.parent != compose.CONF
)
TEXT = ["data=text", "data.path=text.txt"]
GPT = ["model=gpt", "model.width=16", "model.depth=1"]
#: what an option needs beside it
COMPANY = {
    "data=text": ["data.path=text.txt", *GPT, "task=language"],
    "data=tokens": ["data.path=tokens.npy", "data.context_length=16", "data.num_workers=0", *GPT, "task=language"],
    "model=gpt": [*TEXT, "task=language", "model.depth=1"],
    "model=transformer": ["data=synthetic", "data.num_rows=300", "data.shape=[2,32]"],
    "task=language": [*TEXT, *GPT],
    "experiment=gpt_characters": ["data.path=text.txt", "data.context_length=16"],
    "data=arrays": ["data.path=rows.npz", "model=mlp"],
    "task=regression": ["data=synthetic", "data.num_classes=null"],
    "data=synthetic": ["data.num_rows=300"],
    "experiment=overhead": ["data.num_rows=300"],
}


@pytest.mark.parametrize("option", OPTIONS)
def test_every_option_runs_a_few_steps(option, own_folder):
    import numpy as np

    np.savez(own_folder / "rows.npz", x=np.random.default_rng(0).normal(size=(60, 4)), y=np.arange(60) % 2)
    np.save(own_folder / "tokens.npy", np.arange(700) % 9)
    (own_folder / "text.txt").write_text("a line of text.\n" * 200)
    words = [
        option,
        *COMPANY.get(option, []),
        "train.num_epochs=1",
        "train.num_steps=2",
        "tracking.enabled=false",
        "hydra.run.dir=run",
    ]
    assert cli.main(words) == 0
    assert json.loads((own_folder / "run" / "summary.json").read_text())["num_steps"] == 2


def test_the_first_line_of_an_experiment_says_how_to_run_it():
    for path in (compose.CONF / "experiment").glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert f"python -m runner experiment={path.stem}" in lines[1]


def test_every_key_of_the_schema_has_its_default_in_conf():
    cfg = compose.composer([])([])
    assert config.faults(cfg) == []
    assert {"device", "seed", "name", "train", "tracking", "facts"} <= set(cfg)

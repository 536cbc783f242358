"""Every file in conf/ composes, has the required keys, and runs."""

import importlib.util
import shlex

import pytest
import torch
from hydra.errors import HydraException

from runner import cli
from runner.config import compose, override_errors, validate
from runner.config.packages import install
from runner.config.settings import Settings
from runner.distributed.group import Alone
from runner.experiment.build import prepare
from runner.training.fit import fit
from runner.training.observer import Observer
from runner.training.signals import Stop

OPTIONS = sorted(
    f"{path.parent.relative_to(compose.CONF)}={path.stem}"
    for path in compose.CONF.rglob("*.yaml")
    if path.parent != compose.CONF
)
GPT = "model=gpt model.width=16 model.depth=1 task=language"
OWN_VIT = "+model.config.model_type=vit " + " ".join(
    [f"+model.config.{name}=8" for name in ("hidden_size", "intermediate_size")]
    + [f"+model.config.{name}=2" for name in ("num_hidden_layers", "num_attention_heads", "patch_size")]
)
DEFAULTS = "train=default tracking=default"
QUIET = "task.plots=false"  # tests/experiment/plots tests the plots
#: several options in each run; together the runs cover every option
RUNS = [
    f"data=digits model=cnn task=classification {DEFAULTS} optimizer=adam scheduler=constant hydra/launcher=slots hydra/sweeper=grid",
    f"data=text data.path=text.txt {GPT} optimizer=adamw scheduler=cosine hydra/job_logging=file",
    f"data=tokens data.path=tokens.npy data.context_length=16 data.num_workers=0 {GPT} hydra/launcher=ray",
    f"data=arrays data.path=rows.npz model=linear optimizer=sgd hydra/launcher=slurm {QUIET}",
    f"data=huggingface data.path=images model=cnn hydra/sweeper=optuna {QUIET}",
    f"data=images data.path=images model=resnet model.width=4 {QUIET}",
    f"data=breast_cancer model=mlp {QUIET}",
    f"data=diabetes model=mlp task=regression {QUIET}",
    f"data=iris model=mlp scheduler=plateau optimizer=muon {QUIET}",
    f"data=table data.path=rows.csv model=mlp {QUIET}",
    f"data=wine model=mlp {QUIET}",
    f"data=playground model=mlp {QUIET}",
    f"data=mnist1d data.num_rows=300 data.num_test_rows=50 model=gru model.hidden_size=8 {QUIET}",
    f"data=mnist1d data.num_rows=300 data.num_test_rows=50 model=lstm model.hidden_size=8 {QUIET}",
    f"data=synthetic data.num_rows=300 data.shape=[2,32] model=transformer {QUIET}",
    f"model=vit model.width=12 model.depth=1 {QUIET}",
    f"model=huggingface {OWN_VIT} {QUIET}",
    "model=timm",
    f"model=autoencoder task=autoencoding {QUIET}",
    "task=own task.function._target_=my_tasks.loss",
    "experiment=gpt_characters data.path=text.txt data.context_length=16",
    f"experiment=cifar10_94 data.num_rows=300 model.channels=[8,8] {QUIET}",
    f"experiment=overhead data.num_rows=300 {QUIET}",
    *(
        f"experiment=mnist1d_{name} data.num_rows=300 data.num_test_rows=50 {QUIET}"
        for name in ("cnn", "gru", "linear", "mlp")
    ),
    *(f"experiment=sklearn_{name} {QUIET}" for name in ("breast_cancer", "diabetes", "digits", "wine")),
    f"experiment=digits_mlp {QUIET}",
    f"experiment=spiral {QUIET}",
    f"experiment=gan_rings model=gan task=adversarial {QUIET}",
]
#: the optional package that an option needs
PACKAGES = {"model=timm": "timm", "model=huggingface": "transformers"}


def test_conf_every_option_is_in_a_run():
    assert set(OPTIONS) - {word for words in RUNS for word in words.split()} == set()


@pytest.mark.parametrize("words", RUNS, ids=str)
def test_option_of_conf_trains_two_steps(words, own_folder, monkeypatch, capsys):
    import numpy as np
    from PIL import Image

    given = words.split()
    if "data.path=images" in given or "data=huggingface" in given:
        for index in range(60):
            file = own_folder / "images" / f"class_{index % 2}" / f"{index}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            Image.new("RGB", (8, 8), (index, 4 * index, 99)).save(file)
    if "data=huggingface" in given:
        datasets = pytest.importorskip("datasets")
        monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", own_folder / "cache")
    np.savez(own_folder / "rows.npz", x=np.random.default_rng(0).normal(size=(60, 4)), y=np.arange(60) % 2)
    (own_folder / "my_tasks.py").write_text("def loss(model, batch):\n    return model(batch[0]).square().mean()\n")
    (own_folder / "rows.csv").write_text("a,b,y\n" + "".join(f"{i},{i % 3}x,{i % 2}\n" for i in range(60)))
    np.save(own_folder / "tokens.npy", np.arange(700) % 9)
    (own_folder / "text.txt").write_text("a line of text.\n" * 200)
    given += ["device=cpu", "train.num_epochs=1", "train.num_steps=2", "tracking.enabled=false"]
    for option in set(given) & set(PACKAGES):
        if not importlib.util.find_spec(PACKAGES[option]):
            assert cli.main(given) == 2
            assert install(PACKAGES[option]) in capsys.readouterr().err
            return
    cfg = compose.composed_with(compose.composer([]), given)
    parts, settings = prepare(cfg, torch.device("cpu")), Settings.of(cfg)
    result = fit(parts, settings, own_folder / "run", observer=Observer(), stop=Stop(), ranks=Alone())
    assert (result.status, result.num_steps) == ("finished", 2)


def test_experiment_first_line_is_its_command():
    for path in (compose.CONF / "experiment").glob("*.yaml"):
        lines = path.read_text().splitlines()
        assert f"python -m runner experiment={path.stem}" in lines[1]


def test_schema_every_key_has_default_in_conf():
    cfg = compose.composer([])([])
    assert validate.problems(cfg) == []
    assert {"device", "seed", "name", "train", "tracking", "facts"} <= set(cfg)


@pytest.mark.parametrize("option", ["none", "stdout", "disabled", "file"])
def test_hydras_own_ways_to_log_are_whole(option):
    """Python's logging rejects a root with handlers that the configuration does not define."""
    logging = compose.composer([])([f"hydra/job_logging={option}"]).hydra.job_logging
    used = (logging.get("root") or {}).get("handlers") or []
    assert set(used) <= set(logging.get("handlers") or {})
    assert option != "file" or used == ["file"]


def test_scheduler_can_be_removed_and_replaced():
    warm = ["+scheduler._target_=torch.optim.lr_scheduler.CosineAnnealingWarmRestarts", "+scheduler.T_0=5"]
    for words in (["~scheduler"], ["~scheduler", *warm], ["scheduler=cosine", "~scheduler", *warm]):
        cfg = compose.composer([])(words)
        assert validate.problems(cfg) == []
    node = validate.target_node(cfg, "scheduler")
    assert node == {"interval": None, "_partial_": True, "_target_": warm[0].partition("=")[2], "T_0": 5}


def test_quoted_resolver_is_read_as_message_says(monkeypatch):
    monkeypatch.delenv("LRX", raising=False)
    word, explained = "optimizer.lr=${oc.decode:${oc.env:LRX,0.5}}", compose.composer([])
    (problem,) = override_errors.explain(HydraException(), [word], compose=explained, check=lambda cfg: None).problems
    (mend,) = shlex.split(problem.suggestions[0])
    cfg = explained([mend])
    assert validate.problems(cfg) == []
    assert validate.target_node(cfg, "optimizer", resolve=True)["lr"] == 0.5

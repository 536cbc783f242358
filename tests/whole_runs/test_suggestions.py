"""Each suggestion of an error is accepted when it is typed."""

import json
import shlex

import pytest

from runner import cli
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS
from runner.config.compose import composer
from runner.config.override_errors import singles
from runner.device import Gpu, Hardware
from runner.experiment.check import check

#: command lines, and all suggestions of their errors in order
SUGGESTIONS = {
    # other frameworks' names
    "gpu=true": ["device=cuda"],
    "gpus=1": ["device=cuda"],
    "trainer.devices=2": ["device=all"],
    "accelerator=gpu": ["device=cuda"],
    "device=rocm": ["device=cuda"],
    "--gpu 0": ["device=auto"],
    "--no-cuda": ["device=cpu"],
    "--epochs 3": ["train.num_epochs=3"],
    "epochs": ["train.num_epochs=10"],
    "trainer.max_epochs=3": ["train.num_epochs=3"],
    "lr=0.1": ["optimizer.lr=0.1"],
    "lr=abc": ["optimizer.lr=0.001"],
    "learning_rate=-1": ["optimizer.lr=0.001"],
    "optimizer.learning_rate=1": ["optimizer.lr=1"],
    "batch_size=64": ["train.batch_size=64"],
    "batchsize=0": ["train.batch_size=128"],
    "weight_decay=1e-4": ["optimizer.weight_decay=1e-4"],
    "accumulate_grad_batches=4": ["train.accumulate_steps=4"],
    "gradient_clip_val=1": ["train.clip_grad_norm=1"],
    "patience=3": ["train.early_stopping.patience=3"],
    "workers=2": ["data.num_workers=2"],
    "precision=16-mixed": ["train.precision=fp16"],
    "train.precision=bfloat16": ["train.precision=bf16"],
    "bf16=true": ["train.precision=bf16"],
    "loss=mse": ["task=regression"],
    "criterion=l1": ["task=regression task.loss=mae"],
    "arch=mlp": ["model=mlp"],
    "hidden_size=64": ["model=mlp 'model.hidden_sizes=[64]'"],
    "optim=adamw": ["optimizer=adamw"],
    "data=csv data.path=a.csv": ["data=table"],
    "logger=false": ["tracking.enabled=false"],
    "fast_dev_run=true": ["train.check=true"],
    "ckpt_path=a.ckpt": ["python -m runner resume last"],
    "run data=iris": ["python -m runner train data=iris"],
    "fit": ["python -m runner train"],
    "test": ["python -m runner evaluate"],
    "help": ["python -m runner --help"],
    # misspelled
    "modle=mlp": ["model=mlp"],
    "optimizer.rl=0.1": ["optimizer.lr=0.1"],
    "optimizer.wieght_decay=0.1": ["optimizer.weight_decay=0.1"],
    "model=timm model.setings.drop_rate=0.1": ["model.settings.drop_rate=0.1"],
    "scheduler.stepsize=1 scheduler._target_=torch.optim.lr_scheduler.StepLR": ["scheduler.step_size=1"],
    "scheduler._target_=StepLR scheduler.step_size=1": ["scheduler._target_=torch.optim.lr_scheduler.StepLR"],
    "optimizer._target_=optim.SGD": ["optimizer._target_=torch.optim.SGD"],
    "train.num_epoch=x": ["train.num_epochs=10"],
    "-m sed=1,2": ["seed=1,2"],
    "trian": ["python -m runner train"],
    "model=mlpp": ["model=mlp"],
    # values and syntax
    "train.num_epochs=-1 model.dropout=2 optimizer.lr=1e-3s": [
        "train.num_epochs=1",
        "model.dropout=0.1",
        "optimizer.lr=0.001",
    ],
    "data=table data.path=a.csv data.decimal=,": ["'data.decimal=\",\"'"],
    "optimizer.lr=0,01": ["optimizer.lr=0.01", "-m optimizer.lr=0,01"],
    "seed=0,1": ["-m seed=0,1"],
    "model=mlp model.hidden_sizes=1,2": ["'model.hidden_sizes=[1,2]'"],
    "model=mlp model._target_=torch.nn.Linear +model.in_features=8 +model.out_features=2": [
        "model.in_features=8",
        "model.out_features=2",
    ],
    "optimizer.momentum=0.9": ["optimizer=muon optimizer.momentum=0.9", "optimizer=sgd optimizer.momentum=0.9"],
    "optimizer=sgd optimizer.eps=0.1": [f"optimizer={name} optimizer.eps=0.1" for name in ("adam", "adamw", "muon")],
    "data.path=x.csv": ["data=table data.path=x.csv"],
    "model=mlp model._target_=runner.models.MPL": ["model._target_=runner.models.MLP"],
    # no suggestion is certain
    "--verbose": [],
    "data=mnist": [],
    "dataset=cifar10": [],
    "experiment=nothing": [],
    "model=resnet50": [],
    "hydra.sweeper.n_jobs=1": [],
    "hydra.sweeper.sampler.seed=1": [],
    "sweep.slots={gpu:2}": [],
    "optimizer.params=1": [],
    "~modle": [],
    "model = mlp": ["model=mlp"],
    "optimizer.lr = 0.1": ["optimizer.lr=0.1"],
    "optimizer.lr=${oc.env:NOT_SET}": [],
    "--cfg job --resolve train.num_epochs=${oc.env:NOT_SET}": [],
}


@pytest.mark.parametrize(("line", "expected"), SUGGESTIONS.items(), ids=SUGGESTIONS)
def test_suggestion_typed_back_is_accepted(line, expected, own_folder, capfd):
    words = shlex.split(line)
    assert cli.main([*words, "--json"]) == 2
    problems = json.loads(capfd.readouterr().out)["faults"]
    assert [text for problem in problems for text in problem["suggestions"]] == expected
    for problem in problems:
        rest = [each for each in problems if each is not problem]
        others = {each["asked"]: each["suggestions"][0] for each in rest if each["suggestions"]}
        for text in problem["suggestions"]:
            typed = " ".join(words)
            for asked, suggestion in {**others, problem["asked"]: text}.items():
                typed = text if text.startswith("python") else typed.replace(asked, suggestion)
            accept(shlex.split(typed))


def accept(words):
    if words[:3] == ["python", "-m", "runner"]:
        assert words[3] in (*COMMANDS, "--help")
        words = words[4:] if words[3] == "train" else []
    cfg = composer([])([next(iter(singles(text))) for text in parse(COMMANDS["train"], words).overrides])
    gpu = Gpu("GPU", 2**34, 2**34)
    check(cfg, Hardware(cuda=(gpu, gpu), cuda_build="12.8"))


@pytest.mark.parametrize(
    "line",
    [
        "optimizer.weight_decay=5e-4",
        "optimizer.amsgrad=true",
        "scheduler._target_=torch.optim.lr_scheduler.StepLR scheduler.step_size=10",
        "scheduler=cosine scheduler._target_=torch.optim.lr_scheduler.StepLR scheduler.step_size=10",
        "model=timm model.settings={img_size:32}",
        "model=huggingface model.config={model_type:bert,hidden_size:128}",
        "experiment=gan_rings optimizer.turns.critic.every=2",
    ],
)
def test_argument_of_the_target_needs_no_plus(line, own_folder):
    accept(line.split())

"""Optimizers that take turns: from YAML to the weights of a hand-written loop, or an error for settings that do not fit."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.nn.functional import softplus

from runner import cli
from runner.config.compose import composer
from runner.experiment.build import prepare
from runner.tracking.journal_reader import read_points

SMALL = [
    *("experiment=gan_rings", "device=cpu", "tracking.enabled=false", "task.plots=false", "data.num_rows=400"),
    *(
        "train.batch_size=32",
        "train.ema_decay=null",
        "scheduler=constant",
        "model.hidden_sizes=[16]",
        "train.num_steps=20",
    ),
]
OWN = """
def loss(model, batch, turn=None):
    on, of = model.output.weight.square().mean(), model.hidden[0].weight.square().mean()
    return {"loss": {"last": on, "first": of, None: on + of}[turn]}

def shared(model, batch, turn=None, shared=None):
    return {"loss": model(batch[0]).square().mean()}

def one(model, batch):
    return {"loss": model(batch[0]).square().mean()}
"""


def clipped(model, norm):
    if norm != "null":
        torch.nn.utils.clip_grad_norm_(model.parameters(), norm)


@pytest.mark.parametrize(("every", "clip"), [(1, "null"), (2, 0.05)])
def test_run_equals_the_textbook_loop_bitwise(every, clip, own_folder):
    words = [*SMALL, f"optimizer.turns.generator.every={every}", f"train.clip_grad_norm={clip}"]
    assert cli.main([*words, "hydra.run.dir=run"]) == 0
    cfg = composer([])(words)
    del cfg.hydra
    made = prepare(cfg, torch.device("cpu"))
    model, batches = made.model, made.train
    critic = torch.optim.Adam(model.critic.parameters(), lr=0.004, betas=(0.5, 0.999), fused=True)
    generator = torch.optim.Adam(model.generator.parameters(), lr=0.001, betas=(0.5, 0.999), fused=True)
    told = []
    for step in range(20):
        epoch, number = divmod(step, batches.num_batches)
        real = list(batches.epoch(epoch))[number][0]
        with torch.no_grad():
            fake = model.generator(torch.randn(len(real), model.latent_size))
        on_critic = softplus(model.critic(fake) - model.critic(real)).mean()
        critic.zero_grad()
        on_critic.backward()
        clipped(model.critic, clip)
        critic.step()
        if step % every == 0:
            fake = model.generator(torch.randn(len(real), model.latent_size))
            on_generator = softplus(model.critic(real) - model.critic(fake)).mean()
            generator.zero_grad()
            on_generator.backward()
            clipped(model.generator, clip)
            generator.step()
        told.append((on_critic.item(), on_generator.item()))
    points = read_points(Path("run"))
    assert [value for _, value in points["train/loss_critic"]] == [one for one, _ in told]
    assert [value for _, value in points["train/loss_generator"]] == [other for _, other in told]
    state = torch.load("run/checkpoints/last.pt", weights_only=True)
    for name, value in model.state_dict().items():
        assert torch.equal(value, state["model"][name]), name


def test_a_task_and_optimizers_of_ones_own(own_folder):
    (own_folder / "my_tasks.py").write_text(OWN)
    turns = "{last:{params:output,lr:0.5},first:{params:[hidden],_target_:torch.optim.SGD,lr:0.25,every:2}}"
    words = ["device=cpu", "model=mlp", "model.hidden_sizes=[8]", "task=own", "task.function._target_=my_tasks.loss"]
    words += ["train.num_steps=5", "tracking.enabled=false", "model.freeze=[hidden.0.bias]", "train.clip_grad_norm=1"]
    assert cli.main([*words, f"optimizer.turns={turns}", "scheduler=cosine", "hydra.run.dir=run"]) == 0
    points = read_points(Path("run"))
    losses = [value for _, value in points["train/loss_first"]]
    assert losses[0] == losses[1] != losses[2]
    assert {"train/grad_norm_last", "train/grad_norm_first", "val/loss"} <= set(points)
    rates = [value for _, value in points["train/lr_first"]], [value for _, value in points["train/lr"]]
    assert rates[0] == [value / 2 for value in rates[1]] and len(set(rates[0])) > 2


@pytest.mark.parametrize(
    ("words", "so", "write"),
    [
        (["train.cuda_graph=true"], "one optimizer's step", "train.cuda_graph=false"),
        (["optimizer.groups=[{match:critic,lr:1}]"], "its own parameters and settings", "optimizer.groups=null"),
        (["train.num_processes=2"], "several losses in one", "train.num_processes=1"),
        (["optimizer.turns.critic.params=generator"], "both own generator.hidden.0.weight", "only one of them"),
        (
            ["optimizer.turns.critic.params=critic.hidden"],
            "owns critic.output.weight",
            "model.freeze=[critic.output.weight]",
        ),
        (["optimizer.turns.critic.params=critics"], "matches no parameter", "critic"),
        (["optimizer.turns.generator.every=0"], "must be {NAME:", "optimizer.turns={critic:"),
        (["optimizer.turns.critic.lr=fast"], "a number", "optimizer.turns.critic.lr=0.001"),
        (["+optimizer.turns.critic.momentum=0.9"], "", "optimizer.turns.critic.momentum"),
        (["+optimizer.turns.critic._target_=os.system"], "not a part", ""),
        (["optimizer.turns=null"], "a loss for each of critic and generator, and there is one", "generator: {params"),
        (
            ["model=mlp", "optimizer.turns.critic.params=hidden", "optimizer.turns.generator.params=output"],
            "MLP has no generate",
            "model=gan",
        ),
        (["data=wine", "~data.num_rows", "~data.shape", "~data.noise"], "Prepared has no generate", "model=gan"),
    ],
)
def test_turns_report_conflicts_before_tracking(words, so, write, own_folder, capsys):
    given = [word for word in SMALL if f"~{word.partition('=')[0]}" not in words]
    assert cli.main([*given, *words, "hydra.run.dir=run"]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert so in told and write in told
    assert not list(Path().glob("run/journal/*"))


def test_a_task_with_one_loss_is_refused(own_folder, capsys):
    (own_folder / "my_tasks.py").write_text(OWN)
    turns = "optimizer.turns={a:{params:hidden},b:{params:output}}"
    assert cli.main(["device=cpu", "model=mlp", "task=own", "task.function._target_=my_tasks.one", turns]) == 2
    assert "`def loss(model, batch, turn=None)` with turn a, b or None" in capsys.readouterr().err
    assert cli.main(["device=cpu", "model=mlp", turns]) == 2
    assert "optimizer.turns with task=Classification" in capsys.readouterr().err


def test_shared_tensors_refuse_what_splits_them(own_folder, capsys):
    (own_folder / "my_tasks.py").write_text(OWN)
    turns = "optimizer.turns={a:{params:hidden},b:{params:output}}"
    words = ["device=cpu", "model=mlp", "task=own", "task.function._target_=my_tasks.shared", turns]
    assert cli.main([*words, "train.compile=true", "train.on_oom=split"]) == 2
    said = capsys.readouterr().err
    assert "train.compile=false" in said and "train.on_oom=fail" in said and "share tensors" in said


def test_lr_find_says_what_to_do_instead(own_folder, capsys):
    assert cli.main(["lr-find", *SMALL]) == 2
    assert "optimizer.turns.critic.lr=" in capsys.readouterr().err


def test_a_plan_simulates_all_turns(own_folder, warm_programs):
    assert cli.main(["plan", *SMALL]) == 0
    assert json.loads(Path("plan.json").read_text())


def test_the_recipe_draws_its_picture(own_folder, ink):
    words = [word for word in SMALL if word != "task.plots=false"]
    assert cli.main([*words, "hydra.run.dir=run", "train.on_oom=split", "train.ema_decay=0.9"]) == 0
    assert (own_folder / "run" / "plots" / "generated.png").stat().st_size > 10_000
    summary = json.loads((own_folder / "run" / "summary.json").read_text())
    assert summary["metrics"]["test/loss"] > 0 and summary["hints"] == []


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the runs are forked from one with torch, see test_stops.py")
def test_turns_killed_after_each_step_end_identical(warm, tmp_path):
    """Kills in the middle of epochs, and in steps that one of the optimizers skips."""
    script = Path(__file__).with_name("stops.py")
    words = [*SMALL, "data.num_rows=200", "train.num_steps=11", "scheduler=cosine", "train.ema_decay=0.9"]
    words += ["optimizer.turns.generator.every=3", "train.checkpoint_every_steps=2", "metrics.pull_every=4"]
    words = [word for number, word in enumerate(words) if word.partition("=")[0] not in " ".join(words[number + 1 :])]
    command = [sys.executable, str(script), str(tmp_path), "each", *words]
    process = warm.program(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    told, _ = process.communicate()
    assert process.returncode == 0, told
    expected = outcome(tmp_path / "whole")
    assert {"train/loss_critic", "train/lr_generator", "val/loss"} <= set(expected[0])
    assert [number for number in range(1, 11) if outcome(tmp_path / str(number)) != expected] == []


def outcome(folder):
    """Return a run's points and its last state, each tensor by its bytes."""
    points = {name: rows for name, rows in read_points(folder).items() if not name.startswith("speed/")}
    state = torch.load(folder / "checkpoints" / "last.pt", weights_only=True)
    return points, plain({name: value for name, value in state.items() if name not in ("seconds", "experiment")})


def plain(tree):
    if isinstance(tree, dict):
        return {name: plain(value) for name, value in tree.items()}
    if isinstance(tree, list | tuple):
        return [plain(value) for value in tree]
    return tree.numpy().tobytes() if isinstance(tree, torch.Tensor) else tree

import math
from types import SimpleNamespace

import pytest
import torch
from members import trained_alone
from torch import nn
from torch.nn import functional as F

import runner
from runner.config.instantiate import build
from runner.device.precision import make_precision
from runner.errors import RunnerError
from runner.inspection.host_reads import HostReads
from runner.models.card import read_card
from runner.models.generate import sample
from runner.models.gpt import GPT
from runner.tasks import metrics
from runner.tasks.language import Language
from runner.tasks.task import is_predicting
from runner.training.evaluate import evaluate, make_eval_step
from runner.training.optimizer import make_optimizer
from runner.training.step.train_step import make_step

CPU = torch.device("cpu")
LOGITS = torch.tensor([[[2.0, 0.0, 0.0], [0.0, 2.0, 0.0]], [[0.0, 0.0, 2.0], [1.0, 0.0, 0.0]]])
TARGETS = torch.tensor([[0, 0], [2, 0]])
SMALL = ("model=gpt", "model.width=16", "model.depth=1", "model.num_heads=2", "task=language", "device=cpu")


class Fixed(nn.Module):
    def __init__(self, wrapped):
        super().__init__()
        self.wrapped = wrapped

    def forward(self, inputs):
        return SimpleNamespace(logits=LOGITS) if self.wrapped else LOGITS


@pytest.mark.parametrize("wrapped", [False, True], ids=["a tensor", "an object with logits"])
def test_cross_entropy_over_all_positions_and_the_part_that_is_right(wrapped):
    task, model, batch = Language(), Fixed(wrapped), (TARGETS, TARGETS)
    assert is_predicting(task)
    values = task(model, batch)
    assert list(values) == ["loss", "accuracy"]
    assert values["loss"].item() == pytest.approx(F.cross_entropy(LOGITS.flatten(0, 1), TARGETS.flatten()).item())
    assert values["accuracy"].item() == 0.75
    outputs = task.outputs(model, batch)
    assert outputs is LOGITS and task.judge(outputs, batch) == values
    assert torch.allclose(task.predictions(outputs).sum(-1), torch.ones(2, 2))
    assert task.targets(batch) is TARGETS


def test_padding_counts_for_nothing():
    padded = torch.tensor([[0, -100], [2, -100]])
    values = Language()(Fixed(False), (padded, padded))
    kept = F.cross_entropy(LOGITS[:, 0], padded[:, 0])
    assert values["loss"].item() == pytest.approx(kept.item())
    assert values["accuracy"].item() == 1
    values = Language(ignore_index=0)(Fixed(False), (TARGETS, torch.zeros_like(TARGETS)))
    assert (values["loss"].item(), values["accuracy"].item()) == (0, 0), "nothing else in the batch"


def evaluated(task, size):
    """Evaluate a padded split in batches of this size. Returns the values, the logits and the targets."""
    draw = torch.Generator().manual_seed(0)
    logits, targets = torch.randn(8, 6, 5, generator=draw), torch.randint(5, (8, 6), generator=draw)
    targets[torch.arange(6) >= torch.tensor([6, 1, 2, 0, 5, 0, 3, 4])[:, None]] = -100
    batches, precision = zip(logits.split(size), targets.split(size), strict=True), make_precision("fp32", device=CPU)
    return evaluate(nn.Identity(), task, batches, precision=precision), logits, targets


@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_token_counts_the_same_in_any_batches(size):
    found, logits, targets = evaluated(Language(), size)
    assert found["loss"] == pytest.approx(F.cross_entropy(logits.flatten(0, 1), targets.flatten()).item(), rel=1e-6)
    right = (logits.argmax(-1) == targets)[targets != -100].float().mean().item()
    assert found["accuracy"] == pytest.approx(right) and found["perplexity"] == pytest.approx(math.exp(found["loss"]))


@pytest.mark.parametrize(("kind", "most"), [("a function", 2**24), ("an object", 10), ("torchmetrics", 10)])
def test_metrics_are_of_the_tokens_that_count(monkeypatch, kind, most):
    monkeypatch.setattr(metrics, "MAX_WAITING", most)  # all batches at once, and one by one

    def right(said, true):
        return (said.argmax(-1) == true).float().mean()

    made = {"a function": lambda: right, "an object": Counted, "torchmetrics": accuracy}[kind]()
    found, *_ = evaluated(Language(metrics={"right": made}), 3)
    assert list(found) == ["loss", "accuracy", "right", "perplexity"]
    assert found["right"] == pytest.approx(found["accuracy"])


class Counted:
    """A custom metric."""

    def __init__(self):
        self.reset()

    def reset(self):
        self.right, self.all = 0, 0

    def update(self, said, true):
        self.right, self.all = self.right + (said.argmax(-1) == true).sum(), self.all + len(true)

    def compute(self):
        return self.right / self.all


def accuracy():
    return pytest.importorskip("torchmetrics").classification.MulticlassAccuracy(5, average="micro")


def test_metrics_that_can_not_be_are_refused_before_a_run():
    with pytest.raises(RunnerError, match="already reports perplexity"):
        Language(metrics={"perplexity": lambda said, true: said.mean()})
    with pytest.raises(RunnerError, match="there is no metric `f1` for a task of kind language"):
        Language(metrics=["f1"])


def test_what_follows_from_a_loss():
    loss = 2 * math.log(2)
    assert Language().derived({"loss": loss}) == {"perplexity": pytest.approx(4)}
    told = Language(bytes_per_token=4.0).derived({"loss": loss})
    assert told == {"perplexity": pytest.approx(4), "bits_per_byte": pytest.approx(0.5)}
    assert Language().derived({"loss": 1e4}) == {"perplexity": math.inf}
    assert math.isnan(Language().derived({"loss": math.nan})["perplexity"])
    assert Language().derived({"accuracy": 1.0}) == Language(label_smoothing=0.1).derived({"loss": loss}) == {}


def test_steps_and_evaluations_read_nothing(device):
    torch.manual_seed(0)
    model = GPT(9, 8, 16, 2, 2).to(device)
    optimizer = make_optimizer(torch.optim.AdamW, model, device=device)
    step = make_step(
        model, Language(), optimizer=optimizer, precision=make_precision("fp32", device=device), clip_grad_norm=1.0
    )
    tokens = torch.randint(9, (4, 9)).to(device)
    batch = tokens[:, :-1], tokens[:, 1:]
    step([batch])
    task = Language(metrics={"mean": lambda said, true: said.mean()}).to(device)
    judge = make_eval_step(task, precision=make_precision("fp32", device=device))
    with HostReads(device) as watch:
        step([batch])
        judge(nn.Identity(), (LOGITS.to(device), TARGETS.to(device)))
    assert [str(read) for read in watch.reads] == []


def words(folder, **settings):
    (folder / "a.txt").write_text("the cat sat on the mat.\n" * 60)
    given = {"data": "text", "data.path": "a.txt", "data.context_length": 16, "tracking.enabled": "false", **settings}
    return [*SMALL, *(f"{key}={value}" for key, value in given.items())]


def test_a_whole_run_and_what_can_be_done_with_its_folder(own_folder):
    overrides = words(own_folder, **{"train.num_epochs": 25, "train.batch_size": 16, "optimizer.lr": 0.01})
    summary = runner.run(overrides, folder="run")
    assert summary["status"] == "finished", summary["error"]
    assert summary["host_reads"]["unexpected"] == 0
    assert summary["metrics"]["val/loss"] < 1.0 < math.log(13)
    card = read_card(own_folder / "run")
    assert card.facts["vocab_size"] == len(set("the cat sat on the mat.\n"))
    model, reader = build(card.model), build(card.reader)
    weights = torch.load(own_folder / "run/checkpoints/best.pt", weights_only=True)["model"]
    model.load_state_dict(weights)
    said = sample(model, reader, num_tokens=500)
    assert "\nthe cat sat on the mat.\n" in said


def test_language_run_resumes_within_epoch(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat.\n" * 60)
    words = [*SMALL[:-1], "data._target_=runner.data.text", f"data.path={tmp_path}/a.txt", "data.context_length=16"]
    words += ["data.residency=stream", "data.limit=null", "train.batch_size=8"]
    (whole,) = trained_alone(tmp_path / "whole", [*words, "train.num_steps=14"], [[]])
    trained_alone(tmp_path / "part", [*words, "train.num_steps=5"], [[]])
    (part,) = trained_alone(tmp_path / "part", [*words, "train.num_steps=14"], [[]])
    one, two = whole.state()["model"], part.state()["model"]
    assert all(torch.equal(one[name], two[name]) for name in one)


def test_what_takes_tokens_says_so_of_other_data(own_folder):
    with pytest.raises(RunnerError) as caught:
        runner.run(["data=digits", "model=gpt", "tracking.enabled=false"], folder="run")
    assert "data=text" in str(caught.value)

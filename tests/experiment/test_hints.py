"""Hints at the end of a run: each appears for its cause, and not for the healthy variant."""

import json
from pathlib import Path

import pytest

from runner import cli
from runner.experiment.hints import waiting

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, inputs=4, outputs=3, last=None, unused=False, cut=False):
        super().__init__()
        self.last, self.cut = last, cut
        self.inner, self.out = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        if unused:
            self.unused = nn.Linear(3, 3)
            self.aside = nn.Linear(inputs, outputs)

    def forward(self, inputs):
        inner = self.inner(inputs).relu()
        found = self.out(inner.detach() if self.cut else inner)
        return found if self.last is None else getattr(self, self.last)(found)

    def softmax(self, found):
        return found.softmax(1)

    def module(self, found):
        return nn.Softmax(dim=1)(found).view(found.shape)

    def sigmoid(self, found):
        return torch.sigmoid(found)

    def over_rows(self, found):
        return F.log_softmax(found, 0)

    def relu(self, found):
        return found.relu()

    def fresh(self, found):
        return nn.Linear(3, 3)(found)

    def dropout(self, found):
        return F.dropout(found, 0.5)

    def gate(self, found):
        return 4 * torch.sigmoid(found)

    def between(self, found):  # as logits may be, where little is learnt
        return found.softmax(1) * 0.5

class Words(nn.Sequential):
    def __init__(self, vocab, last=False):
        super().__init__(nn.Embedding(vocab, 8), nn.Linear(8, vocab), *[nn.Softmax(-1)] * last)

def numbers():
    inputs = torch.randn(400, 4, generator=torch.Generator().manual_seed(0))
    return inputs, (3 + inputs.sum(1, keepdim=True))

def rows(num=400, classes=3, noise=False, labels=False):
    made = torch.Generator().manual_seed(0)
    inputs = torch.randn(num, 4, generator=made)
    if labels:
        return inputs, (inputs[:, :3] > 0).float()
    targets = torch.randint(classes, (num,), generator=made) if noise else inputs[:, :classes].argmax(1)
    return inputs, targets
"""
WORDS = ["model=net", "data=own", "tracking.enabled=false", "hydra.run.dir=run", "train.batch_size=32"]


@pytest.fixture
def hints(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    (own_folder / "my_parts.py").write_text(PARTS)
    (own_folder / "text.txt").write_text("a line of text.\n" * 100)
    options = {
        "model/net": "_target_: my_parts.Net\nlast: null\nunused: false\ncut: false\noutputs: 3\n",
        "model/words": "_target_: my_parts.Words\nvocab: ${facts.vocab_size}\nlast: false\n",
        "data/own": "_target_: my_parts.rows\nnum: 400\nclasses: 3\nnoise: false\nlabels: false\n",
        "data/numbers": "_target_: my_parts.numbers\n",
    }
    for name, lines in options.items():
        file = own_folder / "conf" / f"{name}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(lines)

    def of(words, num_steps=12):
        quiet = [] if "task=language" in words else ["task.plots=false"]
        assert cli.main([*WORDS, *quiet, f"train.num_steps={num_steps}", *words.split()]) == 0
        summary = json.loads(Path("run/summary.json").read_text())
        found, log = summary["hints"], Path("run/runner.log").read_text()
        assert all(f"hint: {hint}" in log for hint in found) and log.count("hint: ") == len(found)
        return found

    return of


TEXT = "data=text data.path=text.txt data.context_length=8 task=language model=words"
NUMBERS = "data=numbers task=regression model.outputs=1"
TWO = "data.classes=2 model.outputs=1"


@pytest.mark.parametrize(
    ("words", "num_steps", "expected"),
    [
        ("model.last=softmax", 12, "ends in a Softmax, and the loss takes a softmax of its outputs again"),
        ("model.last=sigmoid data.labels=true task.kind=multilabel", 12, "ends in a Sigmoid"),
        ("model.last=over_rows", 12, "ends in a LogSoftmax"),
        ("model.last=relu", 12, "ends in a Relu, and no score is below 0; write the model without it"),
        ("model.unused=true", 12, "4 of 8 parameters never got a gradient other than 0 in 12 steps: unused.weight,"),
        ("model.cut=true", 12, "inner.weight, inner.bias; use them in forward() without detach(), or write model.fr"),
        ("optimizer.lr=100", 12, "always predicting the same costs 1.099: the rate is too high; write optimizer.lr=10"),
        ("model.last=dropout", 12, "two passes over the same rows differ by up to"),
    ],
)
def test_hint_names_a_planted_cause(hints, words, num_steps, expected):
    (hint,) = hints(words, num_steps)
    assert expected in hint


@pytest.mark.parametrize(
    ("words", "num_steps"),
    [
        ("", 60),
        (f"model.last=null {TWO}", 12),
        (TEXT, 12),
        ("model.unused=true model.freeze=[unused,aside]", 12),
        (NUMBERS, 60),
    ],
)
def test_healthy_run_gets_no_hint(hints, words, num_steps):
    assert hints(words, num_steps) == []


@pytest.mark.parametrize(
    ("time", "expected"),
    [
        ({"data": 4.0, "compute": 6.0}, "40% of the training was waiting for data"),
        ({"launch": 9.0, "compute": 1.0, "warm-up": 90.0}, "90% of the training was the host's calls"),
        ({"data": 2.0, "compute": 8.0}, None),
        ({"data": 0.4, "compute": 0.1}, None),
    ],
)
def test_waiting_hint_names_the_cause(time, expected):
    hint = waiting(time)
    assert hint is None if expected is None else expected in hint


def test_a_run_that_failed_gets_none(hints, capsys):
    assert cli.main([*WORDS, "model.last=softmax", "optimizer.lr=1e30", "train.num_epochs=3"]) == 1
    assert "hint:" not in capsys.readouterr().out


def test_model_exiting_in_check_gets_no_hint(hints, monkeypatch):
    def exits(*_given):
        raise SystemExit(3)

    monkeypatch.setattr("runner.experiment.hints._outputs", exits)
    assert hints("model.last=softmax") == []


def test_hints_of_resumed_run_use_whole_run(hints, capsys):
    hints("model.unused=true optimizer.lr=1e-9", 12)
    assert cli.main(["resume", "run", "train.num_steps=24"]) == 0
    (found,) = json.loads(Path("run/summary.json").read_text())["hints"]
    assert "never got a gradient other than 0 in 24 steps" in found
    assert capsys.readouterr().out.splitlines()[-1] == f"hint: {found}"

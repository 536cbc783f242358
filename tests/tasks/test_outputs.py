"""Models that return several tensors, or none: the error names the outputs, and one of them can be selected."""

from collections import namedtuple
from types import SimpleNamespace

import pytest
import torch
from refused import problems_of

from runner.errors import RunnerError
from runner.tasks.classification import Classification
from runner.tasks.language import Language
from runner.tasks.regression import Autoencoding, Regression

LOGITS, PROBS = torch.randn(4, 3), torch.rand(4, 3)
BATCH = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
Pair = namedtuple("Pair", "logits probs")


def loss(found, **settings):
    return Classification(num_classes=3, num_outputs=3, **settings)(lambda inputs: found, BATCH)["loss"]


NAMED = {"logits": LOGITS, "n": 3}


@pytest.mark.parametrize(
    ("found", "output"),
    [
        *(((LOGITS, PROBS), 0), ([PROBS, LOGITS], 1), (NAMED, "logits")),
        *((Pair(LOGITS, PROBS), "logits"), (Pair(LOGITS, PROBS), 0), (SimpleNamespace(logits=LOGITS), "logits")),
    ],
)
def test_one_of_several_is_taken(found, output):
    assert torch.equal(loss(found, output=output), loss(LOGITS))


@pytest.mark.parametrize(
    ("found", "output"),
    [*((found, None) for found in ((LOGITS, PROBS), NAMED, None, 3.0)), *(({"logits": LOGITS}, "logit"), (LOGITS, 0))],
    ids=range(6),
)
def test_unusable_outputs_are_named(found, output, messages):
    messages(problems_of(loss, found, output=output))


def test_every_task_takes_it():
    inputs, targets = torch.randn(4, 3), torch.randn(4, 2)
    regression = Regression(output=1)
    assert regression(lambda x: (None, targets), (inputs, targets))["loss"] == 0
    assert Autoencoding(output="x")(lambda x: {"x": x}, (inputs, None))["loss"] == 0
    tokens, each = torch.zeros(2, 5, dtype=torch.int64), torch.randn(2, 5, 7)
    alone = Language()(lambda x: each, (tokens, tokens))["loss"]
    assert torch.equal(Language(output=0)(lambda x: (each, 3), (tokens, tokens))["loss"], alone)
    for task in (regression, Autoencoding(), Language()):
        with pytest.raises(RunnerError, match="the model gives None"):
            task(lambda x: None, (tokens, tokens) if isinstance(task, Language) else (inputs, targets))


@pytest.mark.parametrize(
    "task", [Classification(num_classes=3, num_outputs=3), Regression(), Language()], ids=lambda task: task.kind
)
@pytest.mark.parametrize(
    ("batch", "is_what"),
    [
        ({"pixels": LOGITS, "label": BATCH[1]}, "a dict of pixels: a tensor (4, 3), label: a tensor (4,)"),
        ((LOGITS,), "a tuple of a tensor (4, 3)"),
        (LOGITS, "a tensor (4, 3)"),
    ],
    ids=["dict", "alone", "tensor"],
)
def test_batch_of_another_form_is_refused(task, batch, is_what):
    (problem,) = problems_of(task, lambda inputs: inputs, batch)
    assert problem.message == f"a batch is {is_what}, and this task takes (inputs, targets)"

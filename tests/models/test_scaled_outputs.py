from collections import OrderedDict, namedtuple
from types import SimpleNamespace

import pytest
import torch
from refused import problems_of

from runner.models.scaled_outputs import Scaled

Pair = namedtuple("Pair", "answer other")
ANSWER, OTHER = torch.tensor([[1.0]]), torch.tensor([[7.0, 7.0]])


def test_outputs_come_in_the_targets_units():
    module = Scaled([100.0, 0.0], [50.0, 2.0])
    assert module(torch.tensor([[0.0, 1.0], [-2.0, 0.5]])).tolist() == [[100.0, 2.0], [0.0, 1.0]]
    assert set(module.state_dict()) == {"means", "spreads"}


@pytest.mark.parametrize(
    ("given", "output", "taken"),
    [
        ((ANSWER, OTHER), 0, lambda found: found),
        ([OTHER, ANSWER], 1, lambda found: found[::-1]),
        (Pair(ANSWER, OTHER), 0, lambda found: (found.answer, found.other)),
        (Pair(ANSWER, OTHER), "answer", lambda found: found),
        (OrderedDict(answer=ANSWER, other=OTHER), "answer", lambda found: found.values()),
        (SimpleNamespace(answer=ANSWER, other=OTHER), "answer", lambda found: (found.answer, found.other)),
    ],
)
def test_of_several_outputs_the_answer_alone_is_scaled(given, output, taken):
    found = Scaled([100.0], [50.0], output=output)(given)
    answer, other = taken(found)
    assert type(found) is type(given) and answer.item() == 150.0 and other is OTHER
    assert next(iter(taken(given))) is ANSWER


@pytest.mark.parametrize(
    ("given", "output", "typed"),
    [
        ((ANSWER, OTHER), None, ("task.output=0", "task.output=1")),
        ({"answer": ANSWER, "n": 3}, None, ("task.output=answer",)),
        ({"answer": ANSWER, "other": OTHER}, "anwser", ("task.output=answer",)),
    ],
)
def test_an_answer_that_nobody_named_is_asked_for(given, output, typed, messages):
    (problem,) = messages(problems_of(Scaled([100.0], [50.0], output=output), given))
    assert problem.suggestions == typed


def test_what_is_no_tensor_is_left_to_the_task():
    assert Scaled([100.0], [50.0])(None) is None

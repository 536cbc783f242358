"""The jobs of a sweep that are trained together, chosen by their configurations only."""

import pytest

from runner.config import compose
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.prepare import PreparedJob
from runner.sweep.jobs.together import in_groups, in_words

MLP = ("model=mlp", "device=cpu")


def jobs(*each, words=MLP):
    make = compose.composer([])
    return [
        PreparedJob(Job(number, own, " ".join(own)), make([*words, *own]), ("cpu",), ("cpu",))
        for number, own in enumerate(each)
    ]


def sizes(prepared, *, batch="auto", num_slots=1):
    return [len(group.jobs) for group in in_groups(prepared, batch=batch, num_slots=lambda devices: num_slots)]


def of(key, *values):
    return [(f"{key}={value}",) for value in values]


@pytest.mark.parametrize(
    ("each", "is_group"),
    [
        (of("seed", 1, 2), True),
        (of("optimizer.lr", 1, 2), True),
        (of("+optimizer.betas", "[0.1,0.2]", "[0.1,0.3]"), True),
        (of("optimizer.groups", *(f"[{{match:output,lr:{rate}}}]" for rate in (0.1, 0.2))), True),
        (of("optimizer.groups", *(f"[{{match:{name},lr:0.1}}]" for name in "ab")), False),
        (of("+scheduler.milestones", "[2]", "[2,3]"), True),
        (of("+scheduler.milestones", "[]", "[4]"), True),
        (of("task.class_weights", "[1,2]", "[1,3]"), True),
        (of("data.augment", "{crop:1}", "{crop:2}"), True),
        (of("data.augment", "{crop:1}", "{crop:0}"), False),
        (of("model.dropout", 0.1, 0.2), False),
        (of("task.class_weights", "[1,2]", "null"), False),
        (of("train.batch_size", 8, 16), False),
        (of("data.num_rows", 8, 16), False),
        (of("model.hidden_sizes", "[8]", "[9]"), False),
    ],
)
def test_in_groups_allows_numbers_to_differ(each, is_group):
    words = (*MLP, "data=synthetic") if "num_rows" in each[0][0] else MLP
    assert sizes(jobs(*each, words=words), batch=8) == ([2] if is_group else [1, 1])


def test_in_groups_fills_available_slots():
    prepared = jobs(*of("seed", *range(8)))
    for num_slots, batch, expected in ((2, "auto", [4, 4]), (3, "auto", [4, 4]), (2, 3, [3, 3, 2])):
        assert sizes(prepared, num_slots=num_slots, batch=batch) == expected
    assert sizes(prepared[:3]) == [1, 1, 1]  # too few of them
    found = in_groups(prepared, batch="auto", num_slots=lambda devices: 2)
    assert [group.num_groups for group in found] == [2, 2]
    assert in_words(found) == [
        "8 jobs differ only in numbers: trained together, in 2 groups (sweep.batch=off: one by one)"
    ]


@pytest.mark.parametrize(
    ("word", "why"),
    [
        ("train.cuda_graph=true", "train.cuda_graph=true"),
        # 588 steps with eight members together, and 3,431 for a single run
        ("train.max_seconds=3", "train.max_seconds is the time of each"),
    ],
)
def test_groups_name_preventing_settings(word, why):
    found = in_groups(jobs(*of("seed", *range(4)), words=(*MLP, word)), batch="auto", num_slots=lambda devices: 2)
    assert in_words(found) == [f"4 jobs that differ only in numbers are trained one by one: {why}"]

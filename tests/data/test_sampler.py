"""The rows that `data.sampler` draws, how often it draws them, and the settings that it refuses."""

import pytest
import torch
from refused import problems_of
from scipy.stats import chi2

from runner.data.loading.order import EPOCH, generator
from runner.data.sampler import class_counts, sampler_of
from runner.data.source import Source, from_arrays

COUNTS = {"cat": 700, "dog": 250, "eel": 50}


def source(counts=None):
    named = counts or COUNTS
    names = [name for name, count in named.items() for _ in range(count)]
    return from_arrays(torch.zeros(len(names), 2), names, name="animals")


def drawn(setting, labels=None, *, of=None, seed=0, epoch=0):
    of = of or source()
    return sampler_of(setting, of.labels if labels is None else labels, of).order(seed=seed, epoch=epoch)


def by_hand(labels, weights, *, seed, epoch):
    """Return the draws in plain Python: of two numbers per row, one chooses the class and the other one of its rows."""
    members = [[row for row, label in enumerate(labels) if label == each] for each in range(len(weights))]
    shares, places = torch.rand(2, len(labels), dtype=torch.float64, generator=generator(seed, EPOCH, epoch)).tolist()
    found = []
    for share, place in zip(shares, places, strict=True):
        below, which = weights[0], 0
        while share >= below / sum(weights):
            which += 1
            below += weights[which]
        found.append(members[which][int(place * len(members[which]))])
    return found


@pytest.mark.parametrize(
    ("setting", "weights"),
    [
        ("balanced", [1, 1, 1]),
        ([0, 1, 3], [0, 1, 3]),
        ([2, 0.5, 0], [2, 0.5, 0]),
        ({"eel": 5, "cat": 1, "dog": 0}, [1, 0, 5]),
    ],
)
def test_rows_equal_those_of_a_loop(setting, weights):
    labels = source().labels[torch.randperm(1000, generator=generator(1))]
    for seed, epoch in ((0, 0), (3, 2)):
        assert drawn(setting, labels, seed=seed, epoch=epoch).tolist() == by_hand(
            labels.tolist(), weights, seed=seed, epoch=epoch
        )


@pytest.mark.parametrize("names", [("false", "true"), ("False", "True")])
def test_booleans_name_classes_of_the_data(names):
    of = source({names[0]: 3, names[1]: 5})
    assert drawn({True: 1, False: 0}, of=of).min() == 3


def unlikely(counts, expected):
    """Return whether such counts occur by chance in less than one of a thousand cases (Pearson's test)."""
    return float(((counts - expected) ** 2 / expected).sum()) > chi2.ppf(0.999, len(counts) - 1)


@pytest.mark.parametrize(("setting", "shares"), [("balanced", [1, 1, 1]), ([1, 2, 7], [1, 2, 7])])
def test_classes_are_drawn_by_their_shares(setting, shares):
    labels = source().labels
    rows = torch.cat([drawn(setting, epoch=epoch) for epoch in range(20)])
    shares = torch.tensor(shares) / sum(shares)
    assert not unlikely(labels[rows].bincount(), 20_000 * shares)
    for which, size in enumerate(COUNTS.values()):
        counts = rows.bincount(minlength=1000)[labels == which]
        assert not unlikely(counts, counts.sum() / size)
    assert unlikely(labels[drawn([7, 2, 1])].bincount(), 1000 * shares)


def test_order_depends_only_on_seed_and_epoch():
    torch.manual_seed(1)
    first = drawn("balanced", seed=3, epoch=2)
    torch.manual_seed(2)
    before = torch.get_rng_state()
    assert torch.equal(first, drawn("balanced", seed=3, epoch=2))
    assert torch.equal(before, torch.get_rng_state())
    orders = {tuple(drawn("balanced", seed=seed, epoch=epoch).tolist()) for seed in range(5) for epoch in range(5)}
    assert len(orders) == 25


def test_order_is_fixed_by_the_seed():
    """A change here changes every existing run with a sampler."""
    assert drawn("balanced", of=source({"cat": 7, "dog": 2, "eel": 1})).tolist() == [6, 0, 9, 9, 6, 3, 8, 7, 0, 6]


@pytest.mark.parametrize(("number", "row"), [(0.0, 700), (1 - 2**-53, 949)])
def test_extreme_draws_choose_a_row(monkeypatch, number, row):
    """A first class or a last class with weight 0 is not chosen at the extremes: their neighbors are."""
    monkeypatch.setattr(torch, "rand", lambda *shape, dtype, generator: torch.full(shape, number, dtype=dtype))
    assert set(drawn([0, 1, 0]).tolist()) == {row}


@pytest.mark.parametrize("missing", [0, 1, 2])
@pytest.mark.parametrize("setting", ["balanced", [1, 1, 1]])
def test_class_without_rows_is_left_out(setting, missing):
    labels = source().labels
    labels = labels[labels != missing]
    counts = labels[drawn(setting, labels)].bincount(minlength=3)
    assert counts[missing] == 0 and counts.sum() == len(labels)
    assert not unlikely(counts[counts > 0], torch.tensor(len(labels) / 2))


def test_classes_without_names_go_by_their_numbers():
    of = Source("mine", None, {}, labels=torch.tensor([0, 0, 0, 2]))
    assert set(drawn({0: 0, 1: 1, 2: 1}, of=of).tolist()) == {3}


def test_null_makes_no_sampler():
    assert sampler_of(None, None, source()) is None


@pytest.mark.parametrize(
    ("setting", "of"),
    [
        ("balanced", from_arrays(torch.zeros(9, 2), torch.rand(9), name="n")),
        ([1, 2], source()),
        ({"cat": 1, "dgo": 2}, source()),
    ],
)
def test_what_can_not_be_drawn(setting, of, messages):
    messages(problems_of(drawn, setting, of=of))


def test_weights_only_of_empty_classes_are_refused(messages):
    labels = source().labels
    messages(problems_of(drawn, [0, 0, 1], labels[labels != 2]))


@pytest.mark.parametrize(
    ("setting", "counts"),
    [
        (None, [700, 250, 50]),
        ("balanced", [334, 334, 334]),
        ([1, 3, 0], [250, 750, 0]),
        ({"dog": 1, "cat": 1, "eel": 2}, [250, 250, 500]),
    ],
)
def test_classes_are_counted_as_they_are_drawn(setting, counts):
    of = source()
    assert class_counts(setting, of.labels, of) == counts

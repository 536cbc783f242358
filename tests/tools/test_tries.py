"""Tries of changes: the jobs and the decision of each look, how often chance is kept, and the ledger."""

import numpy as np
import pytest

from runner.sweep.report.results import Goal
from runner.tools import tries
from runner.tools.tries import Decision, look

LOSS, ACCURACY = Goal("val/loss", "min"), Goal("val/accuracy", "max")
SEEDS = range(48)


class Configuration:
    """Its value for a seed is the seed's part, the configuration's gain, and chance."""

    def __init__(self, random, *, gain=0.0, luck=0.3):
        self.random, self.gain, self.luck, self.values = random, gain, luck, {}

    def measured(self, seeds, common):
        new = [seed for seed in seeds if seed not in self.values]
        self.values |= {seed: common[seed] - self.gain + self.luck * self.random.normal() for seed in new}
        return dict(self.values)


def tried(new, best, common):
    ours, theirs = {}, dict(best.values)
    while not isinstance(found := look(LOSS, SEEDS, ours, theirs), Decision):
        ours, theirs = new.measured(found, common), best.measured(found, common)
    return found


def kept_of(num_tries, seed):
    """Try equal configurations, each against the last one that was kept, with the same values for a seed."""
    random = np.random.default_rng(seed)
    common, best, kept = random.normal(size=len(SEEDS)), Configuration(random), 0
    for _ in range(num_tries):
        new = Configuration(random)
        if tried(new, best, common).verdict == tries.KEPT:
            best, kept = new, kept + 1
    return kept


def test_hundred_useless_tries_keep_at_most_one():
    assert kept_of(100, seed=0) <= 1


def test_repeated_looks_keep_stated_confidence():
    assert tries.NUM_COMPARISONS == 0.05 / tries.ALPHA_OF_A_TRY * 3
    assert 2 * 0.5**tries.LEAST <= tries.ALPHA_OF_A_TRY / 3 < 2 * 0.5 ** (tries.LEAST - 1)


def test_a_gain_is_kept():
    random = np.random.default_rng(0)
    common = random.normal(size=len(SEEDS))
    for gain, most in ((2.0, 12), (0.5, 24)):
        found = tried(Configuration(random, gain=gain), Configuration(random), common)
        assert (found.verdict, found.difference.is_decided) == (tries.KEPT, True)
        assert len(found.values) <= most and found.difference.mean == pytest.approx(-gain, abs=0.3)


def line_of(values, other=0.0, goal=LOSS, **more):
    return look(goal, SEEDS, dict(enumerate(values)), dict.fromkeys(range(48), other), **more)


def test_requested_seeds_per_look():
    """All seeds of the first two looks in any case; after that, it is discarded as soon as it does not look better."""
    for known, wanted in ((0, 4), (4, 12), (12, 24), (24, 48)):
        mixed = [0.4 * (-1) ** seed - 0.1 for seed in range(known)]
        assert line_of(mixed) == list(range(wanted))
    assert line_of([0.4 * (-1) ** seed - 0.1 for seed in range(48)]).why.startswith("48 seeds do not decide it: about")


@pytest.mark.parametrize(
    ("values", "goal", "verdict", "why"),
    [
        ([0.1, 0.2, 0.3, 0.4], LOSS, "discarded", "better with none of 4 seeds"),
        ([-0.1, -0.2, -0.3, -0.4], ACCURACY, "discarded", "better with none of 4 seeds"),
        ([0.0] * 4, LOSS, "discarded", "bitwise identical values"),
        ([0.0, 0.1, 0.2, 0.3], LOSS, "discarded", "better with none of 4 seeds"),
        ([-0.1, *[0.1, -0.05] * 5, 0.2], LOSS, "discarded", "no better, over 12 seeds"),
        ([-1 - seed / 100 for seed in range(12)], LOSS, "kept", "better, over 12 seeds"),
        ([1 + seed / 100 for seed in range(12)], ACCURACY, "kept", "better, over 12 seeds"),
    ],
)
def test_verdicts(values, goal, verdict, why):
    found = line_of(values, goal=goal)
    assert (found.verdict, found.why.startswith(why)) == (verdict, True), found.why


def test_when_the_time_is_up():
    """Only common seeds count; a few of them keep nothing, however good they are."""
    found = line_of([-1 - seed / 100 for seed in range(10)], is_over=True)
    assert (
        found.verdict == "undecided"
        and found.why == "the time was up after 10 seeds of both; fewer than 11 keep nothing"
    )
    assert line_of([-1 - seed / 100 for seed in range(11)], is_over=True).verdict == "kept"
    assert line_of([], is_over=True).difference is None


def test_values_that_can_not_be_more():
    """The code is gone: its seeds can't be extended."""
    theirs = dict.fromkeys(range(3, 17), 0.0)
    assert look(LOSS, list(theirs), {}, theirs) == [3, 4, 5, 6]
    ours = {seed: 0.4 * (-1) ** seed - 0.1 for seed in theirs}
    assert look(LOSS, list(theirs), ours, theirs).why.startswith("14 seeds do not decide it")


def test_failed_seeds_are_replaced():
    """The looks have the same length as always, and the last one has the remaining seeds."""
    theirs = dict.fromkeys(set(range(12)) - {5}, 0.0)
    ours = {seed: 0.4 * (-1) ** seed - 0.1 for seed in range(12)}
    assert look(LOSS, SEEDS, ours, theirs) == [*range(12)]
    assert look(LOSS, SEEDS, ours, theirs, lost={5}) == [0, 1, 2, 3, 4, *range(6, 13)]
    seeds = [seed for seed in SEEDS if seed != 5]
    ours, theirs = {seed: 0.4 * (-1) ** seed - 0.1 for seed in seeds}, dict.fromkeys(seeds, 0.0)
    assert look(LOSS, SEEDS, ours, theirs, lost={5}).why.startswith("47 seeds do not decide it")


def test_the_ledger(tmp_path):
    file, code = tmp_path / "deep" / "tries.jsonl", {"git_commit": None}
    assert tries.read(file) == [] and tries.best([]) is None
    for number, verdict in enumerate(("kept", "discarded", "undecided"), 1):
        against = {"name": "a run", "code": code if number < 3 else {}, "values": {str(number): 0.5}}
        tries.write(file, {"try": number, "verdict": verdict, "against": against})
    with file.open("a") as stream:
        stream.write('{"try": 4, "verd')  # like after a kill
    assert [line["try"] for line in tries.read(file)] == [1, 2, 3]
    tries.write(file, {"try": 5, "verdict": "kept", "against": against})
    lines = tries.read(file)
    assert [line["try"] for line in lines] == [1, 2, 3, 5] and tries.best(lines)["try"] == 5
    assert tries.known_of("a run", code, lines) == {1: 0.5, 2: 0.5} and tries.known_of("another", code, lines) == {}

"""The comparison of two runs' points, and the sentence about it."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from runner.runs.reproduce import reproduce
from runner.runs.reproduce.compare import (
    CLOSE,
    DIFFERENT,
    NEW,
    NOT_COMPARED,
    SAME,
    compare,
    compare_all,
    is_reproduced,
    overall,
)

NAN, INF, MOST = float("nan"), float("inf"), 1.7976931348623157e308


def points(values):
    """Return (steps, values). A list starts at step 1; a dict has its steps."""
    rows = values if isinstance(values, dict) else dict(enumerate(values, start=1))
    return np.array(list(rows), np.int64), np.array(list(rows.values()), np.float64)


#: then, now, whether the ends may differ; the verdict, the first step, common, missing and additional points
CASES = {
    "equal": ([1.0, 0.5], [1.0, 0.5], False, SAME, None, (2, 0, 0)),
    "NaN is NaN": ([1.0, NAN], [1.0, NAN], False, SAME, None, (2, 0, 0)),
    "NaN is no number": ([1.0, NAN, 3.0], [1.0, 2.0, 3.0], False, DIFFERENT, 2, (3, 0, 0)),
    "infinities as a store keeps them": ([MOST, -MOST], [INF, -INF], False, SAME, None, (2, 0, 0)),
    "the other infinity": ([MOST], [-INF], False, DIFFERENT, 1, (1, 0, 0)),
    "the last bit": ([1.0, 1.0], [1.0, float(np.nextafter(np.float32(1), np.float32(2)))], False, CLOSE, 2, (2, 0, 0)),
    "just within": ([1.0], [1.0 + 0.99e-5], False, CLOSE, 1, (1, 0, 0)),
    "just beyond": ([1.0], [1.0 + 1.02e-5], False, DIFFERENT, 1, (1, 0, 0)),
    "relative to a great value": ([1e6], [1e6 + 9], False, CLOSE, 1, (1, 0, 0)),
    "of small values": ([1e-9, 0.0], [2e-9, 1e-8], False, CLOSE, 1, (2, 0, 0)),
    "close first, then different": ([1.0, 1.0, 1.0], [1.0, 1.000001, 1.1], False, DIFFERENT, 3, (3, 0, 0)),
    "steps in another order": ({2: 0.5, 1: 1.0}, [1.0, 0.5], False, SAME, None, (2, 0, 0)),
    "points are missing": ([1.0, 2.0, 3.0], [1.0], False, DIFFERENT, 2, (1, 2, 0)),
    "it was to be shorter": ([1.0, 2.0, 3.0], [1.0], True, SAME, None, (1, 2, 0)),
    "points are added": ([1.0], [1.0, 2.0], False, DIFFERENT, 2, (1, 0, 1)),
    "it was stopped": ([1.0], [1.0, 2.0], True, SAME, None, (1, 0, 1)),
    "it is gone": ([1.0], [], False, DIFFERENT, 1, (0, 1, 0)),
    "it was not there": ([], [1.0], False, NEW, None, (0, 0, 1)),
    "other steps": ({24: 1.0}, {12: 2.0}, True, NOT_COMPARED, None, (0, 1, 1)),
}


@pytest.mark.parametrize("case", CASES)
def test_one_metric(case):
    then, now, may_end_elsewhere, verdict, first, counts = CASES[case]
    found = compare("train/loss", points(then), points(now), may_end_elsewhere=may_end_elsewhere)
    assert (found.verdict, found.first_step) == (verdict, first)
    assert (found.num_common, found.num_missing, found.num_additional) == counts
    assert (found.largest == 0) == (found.largest_step is None)


def test_the_last_point_of_a_step_counts():
    then = np.array([1, 2, 2]), np.array([1.0, 9.0, 2.0])
    assert compare("val/loss", then, points([1.0, 2.0])).verdict == SAME
    assert compare("val/loss", points([1.0, 2.0]), then).verdict == SAME


def test_compare_ignores_metrics_of_machine():
    then = {"speed/steps_per_second": points([9.0]), "system/cpu": points([1.0]), "test/loss": points({12: 3, 24: 2})}
    now = {"speed/steps_per_second": points([7.0]), "test/loss": points({24: 2})}
    (found,) = compare_all(then, now)
    assert (found.name, found.verdict, found.num_missing) == ("test/loss", SAME, 0)


def test_compare_ignores_later_measurements():
    then = {"train/loss": points([1.0]), "eval/test/loss": points({1: 3.0}), "eval/new.csv/test/loss": points({1: 4.0})}
    (found,) = compare_all(then, {"train/loss": points([1.0])})
    assert (found.name, found.verdict) == ("train/loss", SAME)


#: a comparison, and its sentence
SENTENCES = {
    "to the bit": ({"a": [1, 2], "b": [3]}, {"a": [1, 2], "b": [3]}, "reproduced bitwise (3 points of 2 metrics)"),
    "within": (
        {"a": [1.0, 2.0]},
        {"a": [1.0, 2.000004]},
        "reproduced within 1e-5 (2 points of 1 metric; the largest difference is 2.0e-06, of a at step 2)",
    ),
    "different": (
        {"val/loss": {2: 1.0}, "train/loss": [1, 2, 3], "b": [1]},
        {"val/loss": {2: 2.0}, "train/loss": [1, 4, 3], "b": [1]},
        "NOT reproduced: train/loss differs from step 2 on (2 then, 4 now); so does one more",
    ),
    "missing": ({"a": [1, 2], "b": [3]}, {"a": [1, 2]}, "NOT reproduced: b is missing"),
    "shorter": ({"a": [1, 2]}, {"a": [1]}, "NOT reproduced: a has 1 point, and had 2"),
    "a new one": ({"a": [1]}, {"a": [1], "b": [2]}, "reproduced bitwise (1 point of 1 metric)"),
    "nothing": ({}, {"b": [2]}, "NOT reproduced: the two have no point in common"),
}


@pytest.mark.parametrize("case", SENTENCES)
def test_the_sentence_and_the_file(case, tmp_path):
    then, now, sentence = SENTENCES[case]
    found = compare_all(*({name: points(values) for name, values in side.items()} for side in (then, now)))
    output = reproduce.sentence(found)
    assert output == sentence
    assert is_reproduced(found) == output.startswith("reproduced") == (overall(found) != DIFFERENT)
    assert len({len(line) for line in reproduce.table(found)} | {0}) > 1
    run = SimpleNamespace(name="outputs/a", run_id=None, status="finished")
    reproduce.write(tmp_path, run, found, [], said=output, same=is_reproduced(found))
    written = json.loads((tmp_path / "reproduce.json").read_text())
    assert (written["sentence"], written["metrics"].keys()) == (output, now.keys() | then.keys())


def test_compare_writes_infinite_difference_as_text(tmp_path):
    found = compare_all({"a": points([NAN])}, {"a": points([1.0])})
    run = SimpleNamespace(name="outputs/a", run_id=None, status="failed")
    reproduce.write(tmp_path, run, found, [], said="", same=False)
    metric = json.loads((tmp_path / "reproduce.json").read_text())["metrics"]["a"]
    assert (metric["largest"], metric["then"], metric["now"]) == ("inf", "nan", 1.0)


def test_sentence_of_shorter_run_is_harmless():
    found = compare_all({"a\x1b[2J": points([1, 2])}, {"a\x1b[2J": points([1])}, may_end_elsewhere=True)
    output = reproduce.sentence(found, ends=(2, 1))
    assert output == "reproduced bitwise (1 point of 1 metric, up to step 1: it ended at 2 then, and at 1 now)"
    assert "\x1b" not in "".join(reproduce.table(found))

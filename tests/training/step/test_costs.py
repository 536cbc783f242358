"""Whose Python a step spends its time in, and how often that reads the device."""

import importlib

import pytest
import torch

from runner.training.step import costs
from runner.training.step.costs import _is_busy, _own_python, _with_threads

PARTS = """
def slow(values):
    for _ in range(200):
        total = sum(number * number for number in range(100))
    return values * total


def in_a_loop(values):
    total = 0.0
    for number in values:
        total += number.item()
    return total


def in_a_generator(values):
    return sum(number.item() for number in values)
"""


def test_a_function_that_reads_values_is_named_with_its_reads(own_folder):
    (own_folder / "costly_parts.py").write_text(PARTS)
    parts = importlib.import_module("costly_parts")
    values = torch.ones(300)
    for name in ("in_a_loop", "in_a_generator"):
        found = _own_python(lambda name=name: getattr(parts, name)(values), 1.0, ends=0.0)
        assert found.where.endswith(f" in {name}") and found.num_reads == 300
    found = _own_python(lambda: parts.slow(values), 1.0, ends=0.0)
    assert found.where == "costly_parts.py:2 in slow" and found.num_reads == 0 and found.share > 0.3


@pytest.mark.parametrize(
    ("of_most", "ratio", "num_calls"),
    [([5.0, 0.5, 0.7, 0.6], 0.6, 7), ([5.0, 1.2, 0.5, 0.7], 0.7, 7), ([9.0, 3.0, 1.0], 2.0, 5)],
)
def test_more_threads_must_win_most_turns_and_end_once_most_gain_nothing(monkeypatch, of_most, ratio, num_calls):
    threads, taken, left = [1], [], iter(of_most)
    monkeypatch.setattr(costs.torch, "get_num_threads", lambda: threads[-1])
    monkeypatch.setattr(costs.torch, "set_num_threads", threads.append)
    monkeypatch.setattr(costs, "_seconds", lambda take, ends: taken.append(take()) or (next(left) if threads[-1] == 4 else 1.0))  # fmt: skip
    assert _with_threads(lambda: "step", 4, first=lambda: "first") == ratio
    assert taken == ["first", *["step"] * (num_calls - 1)] and threads[-1] == 1


@pytest.mark.parametrize(("load", "busy"), [(1.2, False), (2.0, False), (3.5, True)])
def test_threads_are_not_tried_where_others_want_the_cpus(monkeypatch, load, busy):
    monkeypatch.setattr(costs.os, "getloadavg", lambda: (load, 9.0, 9.0))
    assert _is_busy(2) is busy

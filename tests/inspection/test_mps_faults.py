"""The wrong results of MPS, by operation; and the guard of a run on a simulated Mac, which finds them."""

import pytest
import torch
from simulated import run_simulated
from torch import nn

from runner.device.backends import set_switches
from runner.device.placement import move, place
from runner.inspection.findings import merged
from runner.inspection.guard import Guard, known_fault

ROW = torch.zeros(1)


def rows(*shape):
    return ROW.expand(*shape)  # any number of rows, without memory


def lstm(num_layers, dropout, train):
    return rows(2, 3, 4), [], [], True, num_layers, dropout, train, False, True


def attention(dtype, is_causal):
    return (rows(2, 2, 4, 8).to(dtype),) * 3 + (None, 0.0, is_causal)


ATTENTION = "_scaled_dot_product_attention_math_for_mps"


@pytest.mark.parametrize(
    ("name", "args", "trains", "kind"),
    [
        ("linear", (rows(128, 257, 8), ROW), True, "wrong values"),
        ("linear", (rows(128, 256, 8), ROW), True, None),
        ("linear", (rows(128, 257, 8), ROW), False, None),  # an evaluation, or the backward pass
        ("addmm", (ROW, rows(32_769, 8), rows(8, 4)), True, "wrong values"),
        ("addmm", (ROW, rows(32_768, 8), rows(8, 40_000)), True, None),
        ("mm", (rows(32_769, 8), rows(8, 4)), True, "wrong values"),
        ("convolution", (rows(65_536, 1, 8, 8), ROW), True, "wrong values"),
        ("convolution", (rows(65_535, 1, 8, 8), ROW), True, None),
        ("convolution", (rows(65_536, 1, 8, 8), ROW), False, None),
        ("_lstm_mps", lstm(2, 0.1, True), True, "wrong values"),
        ("_lstm_mps", lstm(1, 0.1, True), True, None),
        ("_lstm_mps", lstm(2, 0.0, True), True, None),
        ("_lstm_mps", lstm(2, 0.1, False), True, None),
        (ATTENTION, attention(torch.bfloat16, True), False, "wrong values"),
        (ATTENTION, attention(torch.float16, True), True, "wrong values"),
        (ATTENTION, attention(torch.float32, True), False, None),
        (ATTENTION, attention(torch.bfloat16, False), False, None),
    ],
)
def test_what_is_wrong_goes_by_sizes(name, args, trains, kind):
    found = known_fault(name, args, trains=trains, is_deterministic=False)
    assert (found and found[0]) == kind


def test_settings_stand_where_they_are_looked_for():
    names = [argument.name for argument in torch.ops.aten._lstm_mps.default._schema.arguments]
    assert names[4:7] == ["num_layers", "dropout", "train"]
    names = [argument.name for argument in getattr(torch.ops.aten, ATTENTION).default._schema.arguments]
    assert (names[0], names[5]) == ("query", "is_causal")


@pytest.mark.parametrize("name", ["index_add", "scatter_add_", "embedding_dense_backward"])
def test_what_adds_as_it_comes_is_told_to_whoever_wants_an_order(name):
    kind, what, write = known_fault(name, (), trains=False, is_deterministic=True)
    assert kind == "no fixed order" and name in what and "train.deterministic=false" in write
    assert known_fault(name, (), trains=False, is_deterministic=False) is None


class Many(nn.Module):
    """Few rows with many positions."""

    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 2)
        self.linear = nn.Linear(2, 2)

    def forward(self, tokens):
        return self.linear(self.embedding(tokens)).mean()


def watched(device, length, deterministic, trains):
    """Return [kind, text of the line] of each finding in a step."""
    torch.set_num_threads(1)
    set_switches(device, precision="fp32", deterministic=deterministic)
    model = place(Many(), device).train(trains)
    guard = Guard(device, when="first_step", model=model, task=None)
    batch = move(torch.zeros(3, length, dtype=torch.int64), device)

    def step(batch):
        with torch.set_grad_enabled(trains):
            loss = model(batch)
        if trains:
            loss.backward()

    guard.on(step)(batch)
    return [[found.kind, found.line and found.line.partition(":")[0]] for found in merged(guard.findings)]


@pytest.mark.slow
def test_a_runs_first_step_tells_of_it():
    here = "tests/inspection/test_mps_faults.py"
    wrong = ["wrong values", here]
    assert run_simulated("mps", watched, 11_000, False, True) == [wrong]
    assert run_simulated("mps", watched, 10_000, False, True) == []
    assert run_simulated("mps", watched, 11_000, False, False) == []
    assert run_simulated("mps", watched, 10, True, True) == [["no fixed order", here]]
    assert run_simulated("cuda:1", watched, 11_000, True, True) == []

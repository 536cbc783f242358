"""A compiled group has the results of its uncompiled members: weights, masks, ends; also after a kill, and after some members end."""

import pytest
import torch
from members import built, largest_difference, members_of, trained_alone, trained_together
from torch import nn

from runner.device import torch_private
from runner.training.observer import Observer
from runner.training.stacked import check, compiled, fit
from runner.training.stacked.check import GroupSize, check_alike
from runner.training.stacked.compiled import Compiled, Function
from runner.training.step.choose import how_to_compile

#: 240 rows: all batches have one size, so that one function is compiled
SAME = ["model=mlp", "model.hidden_sizes=[16]", "train.batch_size=48"]
ALL = [
    *SAME,
    "model.dropout=0.3",
    "scheduler=cosine",
    "scheduler.num_steps=12",
    "train.clip_grad_norm=0.5",
    "train.ema_decay=0.9",
]
SEEDS = [[f"seed={seed}"] for seed in range(4)]


def to_compile(folder, words, each):
    runs, _ = built(folder, words, each)
    return Compiled(how_to_compile(runs[0].parts, is_alone=True), print)


@pytest.fixture
def as_traced(monkeypatch):
    """Run the graph as it was traced, for tests that do not need the compiler."""
    monkeypatch.setattr(torch_private, "compile_graph", lambda graph, inputs, options: graph)


def same_weights(one, other):
    return all(torch.equal(value, other.state()["model"][name]) for name, value in one.state()["model"].items())


def test_compiled_group_equals_single_runs_also_resumed(tmp_path, monkeypatch):
    monkeypatch.setattr("torch._inductor.config.compile_threads", 1)  # with more, torch keeps their threads
    made = to_compile(tmp_path / "made", ALL, SEEDS[:2])
    alone = trained_alone(tmp_path / "alone", ALL, SEEDS[:2])
    whole = trained_together(tmp_path / "whole", ALL, SEEDS[:2], compiled=made)
    weights, points = largest_difference(alone, whole)
    assert weights <= 1e-6 and points <= 1e-5 and not made.why_not
    with monkeypatch.context() as stops:
        stops.setattr(fit.OwnStopCondition, "__call__", lambda _, step, at_once=False: "stopped" if step >= 7 else None)
        short = trained_together(tmp_path / "parts", [*ALL, "train.checkpoint_every_steps=7"], SEEDS[:2], compiled=made)
    assert {run.result.num_steps for run in short} == {7}
    rest = trained_together(tmp_path / "parts", ALL, SEEDS[:2], compiled=made)
    assert all(map(same_weights, whole, rest)) and len(made._functions) == 1


@pytest.mark.usefixtures("as_traced")
def test_compiled_group_shrinks_with_early_stopping(tmp_path):
    words = [*SAME, "train.early_stopping.patience=1", "optimizer=sgd", "optimizer.lr=2.5", "train.num_epochs=6"]
    made = to_compile(tmp_path / "made", words, SEEDS)
    alone = trained_alone(tmp_path / "alone", words, SEEDS)
    together = trained_together(tmp_path / "together", words, SEEDS, compiled=made)
    ends = [run.result.num_epochs for run in alone]
    assert len(set(ends)) > 1 and [run.result.num_epochs for run in together] == ends
    assert {size for size, _ in made._functions} <= {1, 2, 4}
    assert largest_difference(alone, together)[0] <= 1e-5


class EndsEarly(Observer):
    def values(self, values, *, step, time_ms):
        raise RuntimeError("this member ends")


def end_early(member):
    if member.folder.name in ("1", "3"):
        member.observer = EndsEarly()


@pytest.mark.usefixtures("as_traced")
def test_remaining_members_keep_their_own_frozen_weights(tmp_path):
    words = [*SAME, "model.freeze=[hidden]", "train.num_epochs=3"]
    made = to_compile(tmp_path / "made", words, SEEDS)
    alone = trained_alone(tmp_path / "alone", words, SEEDS)
    together = trained_together(tmp_path / "together", words, SEEDS, 2, compiled=made, change=end_early)
    assert [run.result.status for run in together] == ["finished", "failed"] * 2
    assert largest_difference(alone[::2], together[::2])[0] <= 1e-5


#: overrides, and how many of the three members compute together
OTHERS = {
    "several batches a step, of two sizes": (
        [*SAME, "train.accumulate_steps=2", "train.batch_size=50", "optimizer=sgd"],
        2,
    ),
    "in bfloat16, whose gradients have other strides than weights": ([*SAME, "train.precision=bf16"], 3),
    "buffers, and channels last": (["model=cnn", "model.channels=[4]", "train.num_steps=3", "optimizer=sgd"], 2),
}


@pytest.mark.usefixtures("as_traced")
@pytest.mark.parametrize("name", OTHERS)
def test_compiled_steps_equal_eager_ones(tmp_path, name):
    """In pieces, the last of which has one member; or all members at once."""
    words, num = OTHERS[name]
    words = [*words, "backends.cpu.num_threads=1"]
    made = to_compile(tmp_path / "made", words, SEEDS[:3])
    plain = trained_together(tmp_path / "plain", words, SEEDS[:3], num)
    found = trained_together(tmp_path / "found", words, SEEDS[:3], num, compiled=made)
    assert not made.why_not and max(size for size, _ in made._functions) == num
    assert largest_difference(plain, found)[0] <= 1e-5


@pytest.mark.usefixtures("as_traced")
def test_compiled_group_out_of_memory_halves(tmp_path, monkeypatch, capsys):
    words = [*SAME, "model.dropout=0.2"]
    expected = trained_together(tmp_path / "wanted", words, SEEDS)
    made, call, taken = to_compile(tmp_path / "made", words, SEEDS), Function.__call__, []

    def limited(self, *arguments):
        found = call(self, *arguments)  # the masks have been drawn
        taken.append(self._size)
        if self._size > 2 and len(taken) > 3:
            raise torch.OutOfMemoryError("out of memory")
        return found

    monkeypatch.setattr(Function, "__call__", limited)
    found = trained_together(tmp_path / "found", words, SEEDS, compiled=made)
    assert "out of memory: 2 of 4 members at a time now" in capsys.readouterr().out
    assert set(taken) == {4, 2} and largest_difference(expected, found)[0] <= 1e-6


def refuse(graph, inputs, options):
    raise NotImplementedError("no such kernel\nand more of it")


@pytest.mark.parametrize("is_of_the_host", [True, False])
def test_group_that_cannot_compile_is_eager(tmp_path, monkeypatch, is_of_the_host):
    monkeypatch.setattr(check, "choose_size", lambda *arguments, whole, **more: GroupSize(whole, "2 of 2", 0, 0))
    runs, generators = built(tmp_path, [*SAME, "train.compile=true"], SEEDS[:2])
    if is_of_the_host:  # a factor that changes in each forward pass, too small for a comparison of values
        taken, forward = [], nn.Linear.forward
        monkeypatch.setattr(
            nn.Linear, "forward", lambda self, rows: taken.append(1) or forward(self, rows) * (1 + 1e-9 * len(taken))
        )
    else:
        monkeypatch.setattr(torch_private, "compile_graph", refuse)
    why = "the forward pass is another each time by something of the host's" if is_of_the_host else "no such kernel"
    size = check_alike(members_of(runs, generators), is_asked=True)
    assert size.compiled is None and size.words.endswith(f"; compile: nothing, as {why}")


def test_turn_products_gives_contiguous_gradients():
    """A transposed product is not copied for the optimizer."""
    one, other = torch.randn(3, 5, 4), torch.randn(3, 5, 2)
    graph = torch_private.make_fx(lambda x, y: (x.transpose(1, 2) @ y).transpose(1, 2))(one, other)
    expected = graph(one, other)
    compiled.turn_products(graph)
    found = graph(one, other)
    assert found.is_contiguous() and not expected.is_contiguous() and torch.allclose(found, expected)

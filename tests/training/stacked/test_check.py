"""The check names what can't be trained together before the first step, and changes nothing."""

import random
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
import torch
from members import CPU, built, members_of
from torch import nn

from runner.device import backends
from runner.training.schedule import Schedule
from runner.training.stacked import check
from runner.training.stacked.check import GroupSize, check_alike
from runner.training.stacked.stack import CannotStackError, ModelStack

MLP = ["model=mlp", "model.hidden_sizes=[8]"]
seen = []


class Head(nn.Module):
    """Rows of digits to logits. make: Creates a layer in the middle; between: Calls it."""

    def __init__(self, seed, make=nn.Identity, between=lambda layer, hidden: layer(hidden)):
        super().__init__()
        torch.manual_seed(seed)
        self.enter, self.leave = nn.Linear(64, 8), nn.Linear(8, 10)
        self.extra, self.between = make(), between

    def forward(self, rows):
        return self.leave(self.between(self.extra, self.enter(rows.flatten(1))))


class OwnNumber(nn.Module):
    """A number that each member draws when it is created."""

    def __init__(self):
        super().__init__()
        self.factor = float(torch.rand(()))

    def forward(self, hidden):
        return hidden * self.factor


class Carries(nn.Module):
    last = 0.0

    def forward(self, hidden):
        found = hidden + 0.1 * self.last
        self.last = hidden.detach()
        return found


def write_outside(_, hidden):
    """Writes into one tensor that is created here, the same for all members."""
    kept = torch.zeros(hidden.shape)
    kept += hidden.detach()
    return hidden + kept


def calling(between):
    return partial(Head, between=lambda _, hidden: between(hidden))


def recurrent(kind):
    make = partial(kind, 8, 8, batch_first=True)
    return partial(Head, make=make, between=lambda layer, hidden: layer(hidden[:, None])[0][:, 0])


GRU = recurrent(nn.GRU)
BY_VALUES = "what it does depends on values of tensors "
DRAWS = "it draws random numbers by other means than dropout"
NOT_ALONE = "not as in a single run"
CANNOT = {
    "GRU": (GRU, "torch can't take aten::gru.input for several models at once"),
    "LSTM": (recurrent(nn.LSTM), "torch can't take aten::lstm.input for several models at once"),
    "reads": (
        calling(lambda hidden: hidden * (2.0 if hidden.abs().max().item() > 0 else 1.0)),
        f"{BY_VALUES}(.item())",
    ),
    "decides": (calling(lambda hidden: hidden.relu() if hidden.mean() > 0 else hidden), f"{BY_VALUES}(if, while)"),
    "chooses": (
        calling(lambda hidden: hidden * (hidden[hidden > 0].numel() > 0)),
        f"{BY_VALUES}(rows that a mask chooses)",
    ),
    "writes": (partial(Head, between=write_outside), "it writes into a tensor in place that is one for all of them"),
    "noise": (calling(lambda hidden: hidden + torch.randn_like(hidden)), DRAWS),
    "alpha dropout": (partial(Head, make=partial(nn.AlphaDropout, 0.5)), DRAWS),
    "draws by Python": (calling(lambda hidden: hidden * random.random()), NOT_ALONE),
    "draws by NumPy": (calling(lambda hidden: hidden * float(np.random.rand())), NOT_ALONE),
    "counts": (calling(lambda hidden: seen.append(1) or hidden * len(seen)), NOT_ALONE),
    "carries": (partial(Head, make=Carries), "forward replaces `model.extra.last`"),
    "own number": (partial(Head, make=OwnNumber), NOT_ALONE),
    "drops a constant": (
        calling(lambda hidden: hidden + nn.functional.dropout(torch.ones(8))),
        "values that are one for all",
    ),
    "other shape": (
        partial(Head, make=lambda: nn.Linear(8, 8, bias=bool(torch.rand(()) > 0.5))),
        "their weights differ in shape",
    ),
}


def members(folder, make=None, words=(), *, optimizer=torch.optim.Adam):
    runs, generators = built(folder, [*MLP, *words], [["seed=0"], ["seed=1"], ["seed=2"]])
    found = members_of(runs, generators)
    if make is not None:
        for seed, member in enumerate(found):
            model = make(seed)
            made = optimizer(model.parameters(), lr=0.1)
            member.parts = replace(member.parts, model=model, optimizer=made, average=None, schedule=Schedule())
    return found


@pytest.fixture
def all_together(monkeypatch):
    """Train all members together, even if one by one is equally fast."""
    choose = check.choose_size
    monkeypatch.setattr(
        check,
        "choose_size",
        lambda *arguments, whole, **more: choose(*arguments, whole=whole, **more) and GroupSize(whole, "", 0, 0),
    )


def test_choosing_a_size_keeps_the_allocators_cache(tmp_path, monkeypatch):
    emptied = []
    monkeypatch.setattr(backends, "empty_cache", emptied.append)
    check_alike(members(tmp_path), is_asked=True)
    assert emptied == []


@pytest.mark.usefixtures("all_together")
@pytest.mark.parametrize("name", CANNOT)
def test_check_alike_names_the_reason(tmp_path, name):
    make, reason = CANNOT[name]
    found = members(tmp_path, make)
    before = [{name: value.clone() for name, value in member.parts.model.state_dict().items()} for member in found]
    with pytest.raises(CannotStackError) as raised:
        check_alike(found, is_asked=True)
    assert reason in str(raised.value)
    for member, weights in zip(found, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in member.parts.model.state_dict().items())


def test_streamed_examples_are_not_stacked(tmp_path):
    with pytest.raises(CannotStackError, match="its rows are streamed"):
        check_alike(members(tmp_path, words=["data.residency=stream"]), is_asked=True)


def test_check_optimizer_names_unsupported_class(tmp_path):
    class Own(torch.optim.SGD):
        pass

    with pytest.raises(CannotStackError, match="Own may look at the weights of several layers at once"):
        check_alike(members(tmp_path, Head, optimizer=Own), is_asked=True)


NORMED = partial(Head, make=lambda: nn.Sequential(nn.BatchNorm1d(8), nn.ReLU(), nn.Dropout(0.5)))
#: some of its 150,000 values before the ReLU are so close to 0 that rounding decides
KINKS = partial(Head, make=lambda: nn.Sequential(nn.Linear(8, 3000), nn.ReLU(), nn.Linear(3000, 8)))


@pytest.mark.usefixtures("all_together")
@pytest.mark.parametrize(("make", "by", "nudge", "reason"), [
    (KINKS, 3e-3, check.NUDGE, None), (KINKS, 0.5, check.NUDGE, "gradients are"), (KINKS, 0.5, 1.0, "gradients are"),
    (Head, 3e-3, check.NUDGE, "gradients are"), (Head, float("nan"), check.NUDGE, "gradients are"),
])  # fmt: skip
def test_check_alike_tolerates_rounding(tmp_path, monkeypatch, make, by, nudge, reason):
    computed = check._together
    monkeypatch.setattr(check, "NUDGE", nudge)

    def parted(*arguments):
        size, each = computed(*arguments)
        return size, [[loss, *(gradient * (1 + by) for gradient in gradients)] for loss, *gradients in each]

    monkeypatch.setattr(check, "_together", parted)
    found = members(tmp_path, make)
    before = [value.clone() for member in found for value in member.parts.model.parameters()]
    if reason:
        with pytest.raises(CannotStackError, match=reason):
            check_alike(found, is_asked=True)
    else:
        check_alike(found, is_asked=True)
    after = [value for member in found for value in member.parts.model.parameters()]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))


def test_attention_without_dropout_has_a_size(tmp_path):
    """The check tries two members together after one: if one draws no random numbers, two still may."""
    words = ["model=vit", "model.width=8", "model.depth=1", "model.num_heads=2"]
    runs, generators = built(tmp_path, words, [["seed=0"], ["seed=1"]])
    assert "us with 2" in check_alike(members_of(runs, generators), is_asked=True).words


def test_choose_size_tries_two_members(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.training.stacked.check.LONG_STEP", 0.0)
    with pytest.raises(CannotStackError, match="gru"):
        check_alike(members(tmp_path, GRU), is_asked=True)


def test_choose_size_respects_memory(tmp_path, monkeypatch):
    """All members are tried once together, to measure their memory."""
    forward, requested = ModelStack.forward, []

    def limited(*arguments):
        values = forward(*arguments)
        requested.append(len(values["loss"]))
        if requested[-1] > 2:
            raise torch.OutOfMemoryError("out of memory")
        return values

    monkeypatch.setattr(ModelStack, "forward", limited)
    for name in ("LONG_STEP", "MAX_SECONDS"):  # independent of the machine's speed
        monkeypatch.setattr(f"runner.training.stacked.check.{name}", float("inf"))
    assert check_alike(members(tmp_path), is_asked=True).num_together <= 2 and requested.count(3) == 1


def test_check_alike_without_memory_raises(tmp_path, monkeypatch):
    def limited(*arguments):
        raise torch.OutOfMemoryError("out of memory")

    monkeypatch.setattr("runner.training.stacked.check._seconds", limited)
    with pytest.raises(CannotStackError, match="the memory is too small for a step of one"):
        check_alike(members(tmp_path), is_asked=True)


#: torch's layer, whose dropouts are in one of torch's functions, on values that are transposed in memory
ATTENDS = partial(
    Head,
    make=partial(nn.TransformerEncoderLayer, 4, 2, 8, dropout=0.5, batch_first=True),
    between=lambda layer, hidden: layer(hidden.unflatten(1, (2, 4))).flatten(1),
)
DROPS_TRANSPOSED = calling(lambda hidden: nn.functional.dropout(hidden.T, 0.5).T)


@pytest.mark.usefixtures("all_together")
@pytest.mark.parametrize("make", [ATTENDS, DROPS_TRANSPOSED])
def test_dropout_masks_ignore_memory_layout(tmp_path, make):
    check_alike(members(tmp_path, make), is_asked=True)


class Centers(nn.Module):
    """Reads the buffer that it updates."""

    def __init__(self):
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, hidden):
        self.mean.mul_(0.5).add_(hidden.detach().mean(0))
        return hidden - self.mean


@pytest.mark.usefixtures("all_together")
def test_model_that_reads_its_updated_buffer_is_alike(tmp_path):
    check_alike(members(tmp_path, partial(Head, make=Centers)), is_asked=True)


@pytest.mark.parametrize("make", [None, Head, NORMED, ATTENDS, DROPS_TRANSPOSED])
def test_check_alike_restores_everything(tmp_path, make):
    """Weights, running statistics, gradients and the process's generators."""
    found = members(tmp_path, make, ["model.dropout=0.2"])
    before = [{name: value.clone() for name, value in member.parts.model.state_dict().items()} for member in found]
    generators = backends.generator_states(CPU)
    size = check_alike(found, is_asked=True)
    assert 1 <= size.num_together <= 3 and "of 3 jobs compute together" in size.words
    for member, weights in zip(found, before, strict=True):
        assert all(torch.equal(value, weights[name]) for name, value in member.parts.model.state_dict().items())
        assert all(value.grad is None for value in member.parts.model.parameters())
    now = backends.generator_states(CPU)
    assert torch.equal(now["cpu"], generators["cpu"]) and now["python"] == generators["python"]


def test_check_alike_without_gain_raises(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.training.stacked.check.START_SECONDS", 0.0)
    # as if training together took as long as training separately
    monkeypatch.setattr("runner.training.stacked.check.MIN_GAIN", 1.0)
    found = members(tmp_path, Head)
    with pytest.raises(CannotStackError, match=r"that gains nothing: .* of 3 jobs compute together"):
        check_alike(found, is_asked=False)
    check_alike(found, is_asked=True)

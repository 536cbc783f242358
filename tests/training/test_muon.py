"""Muon: torch's Muon steps for a model's hidden matrices and AdamW's for the rest, in one optimizer."""

import copy
from functools import partial

import pytest
import torch
from torch import nn

from runner.models.gpt import GPT
from runner.training.muon import Muon, hidden_matrices
from runner.training.optimizer import make_optimizer
from runner.training.step.fused_update import make_update

CPU = torch.device("cpu")


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.table = nn.Embedding(9, 6), nn.Parameter(torch.zeros(4, 6))
        self.first, self.second, self.output = nn.Linear(6, 8), nn.Linear(8, 7), nn.Linear(7, 3)

    def forward(self, tokens):  # (B, 4)
        return self.output(self.second(self.first(self.embedding(tokens) + self.table)))


def net():
    torch.manual_seed(0)
    return Net()


def names_of(model, parameters):
    wanted = set(parameters)
    return [name for name, each in model.named_parameters() if each in wanted]


def groups_of(**settings):
    model = net()
    made = make_optimizer(partial(Muon, lr=0.1, weight_decay=0.5), model, device=CPU, **settings)
    return [(names_of(model, group["params"]), group["muon"], group["lr"], group["weight_decay"]) for group in made.param_groups]  # fmt: skip


def steps(model, update, num=5):
    tokens = torch.randint(0, 9, (num, 16, 4), generator=torch.Generator().manual_seed(1))
    for batch in tokens:
        model(batch).square().mean().backward()
        update()


@pytest.mark.parametrize("is_fused", [True, False])
def test_muon_is_bitwise_identical_to_torchs(is_fused):
    ours, theirs = net(), net()
    optimizer = make_optimizer(partial(Muon, lr=0.02, weight_decay=0.1, fused=is_fused), ours, device=CPU)
    steps(ours, make_update(optimizer) if is_fused else lambda: (optimizer.step(), optimizer.zero_grad()))
    matrices = [theirs.first.weight, theirs.second.weight]
    rest = [each for each in theirs.parameters() if all(each is not one for one in matrices)]
    both = [
        torch.optim.Muon(matrices, lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw"),
        torch.optim.AdamW(rest, lr=0.02, weight_decay=0.1, betas=(0.9, 0.95), fused=is_fused),
    ]
    steps(theirs, lambda: [(one.step(), one.zero_grad()) for one in both])
    for name, value in ours.state_dict().items():
        assert torch.equal(value, theirs.state_dict()[name]), name


def test_muon_leaves_embeddings_and_output_to_adamw():
    assert names_of(net(), []) == []
    model = net()
    assert names_of(model, hidden_matrices(model)) == ["first.weight", "second.weight"]
    gpt = GPT(vocab_size=11, context_length=8, width=8, depth=1, num_heads=2, positions="learned")
    found = names_of(gpt, hidden_matrices(gpt))
    assert found and all(name.startswith("stack.blocks.0.") and name.endswith(".weight") for name in found)


def test_muon_respects_no_decay_and_groups():
    assert [(muon, decay) for _, muon, _, decay in groups_of(no_decay="norms_and_biases")] == [(True, 0.5), (False, 0.5), (False, 0.0)]  # fmt: skip
    found = groups_of(groups=[{"match": "output", "muon": True, "lr": 0.3}, {"match": "second", "muon": False}])
    assert (["first.weight"], True, 0.1, 0.5) in found
    assert (["output.weight"], True, 0.3, 0.5) in found and (["output.bias"], False, 0.3, 0.5) in found
    assert (["second.weight", "second.bias"], False, 0.1, 0.5) in found


def test_muon_adamw_has_separate_rate():
    made = make_optimizer(partial(Muon, lr=0.1, adamw_lr=0.01), net(), device=CPU)
    assert [(group["muon"], group["lr"]) for group in made.param_groups] == [(True, 0.1), (False, 0.01)]


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
def test_muon_treats_convolution_as_matrix(layout):
    torch.manual_seed(0)
    kernel = nn.Parameter(torch.randn(4, 3, 3, 3).to(memory_format=layout))
    flat = nn.Parameter(kernel.detach().contiguous().flatten(1).clone())
    one, other = Muon([kernel], lr=0.1), torch.optim.Muon([flat], lr=0.1, weight_decay=0.01, adjust_lr_fn="match_rms_adamw")  # fmt: skip
    for _ in range(3):
        gradient = torch.randn(4, 3, 3, 3)
        kernel.grad, flat.grad = gradient.to(memory_format=layout), gradient.flatten(1)
        one.step()
        other.step()
    assert torch.equal(kernel.detach().contiguous().flatten(1), flat)


def test_muon_run_resumes_bitwise_identical():
    whole, half = net(), net()
    made = partial(make_optimizer, partial(Muon, lr=0.02), device=CPU)
    first = made(model=half)
    steps(half, make_update(first), num=3)
    state, weights = copy.deepcopy(first.state_dict()), copy.deepcopy(half.state_dict())
    after = net()
    after.load_state_dict(weights)
    again = made(model=after)
    again.load_state_dict(state)
    steps(half, make_update(first), num=3)
    steps(after, make_update(again), num=3)
    assert all(torch.equal(value, after.state_dict()[name]) for name, value in half.state_dict().items())
    assert not torch.equal(whole.first.weight, after.first.weight)


@pytest.mark.parametrize("wrong", [{"momentum": 1.0}, {"lr": -1}, {"adjust_lr_fn": "none"}, {"ns_steps": 0}, {"betas": (0.9, 1.0)}])  # fmt: skip
def test_what_it_does_not_take_is_said(wrong):
    with pytest.raises(ValueError, match=next(iter(wrong))):
        Muon([nn.Parameter(torch.ones(2, 2))], **wrong)

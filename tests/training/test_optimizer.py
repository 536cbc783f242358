import copy
import math
from functools import partial

import pytest
import torch
from refused import problems_of
from torch import nn

from runner.errors import RunnerError
from runner.training.optimizer import AveragedWeights, Turns, freeze, make_optimizer

CPU = torch.device("cpu")


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.Linear(8, 2))


def test_fused_kernel_is_default_where_there_is_one():
    adam = partial(make_optimizer, model=model(), device=CPU)
    assert adam(torch.optim.Adam).defaults["fused"] is True
    assert adam(partial(torch.optim.Adam, fused=False)).defaults["fused"] is False
    chosen = adam(partial(torch.optim.Adam, foreach=True)).defaults
    assert chosen["foreach"] is True and chosen["fused"] is not True
    assert isinstance(adam(torch.optim.Rprop), torch.optim.Rprop)


def test_averaged_weights_follow_formula_copy_counts():
    net = model()
    average = AveragedWeights(net, decay=0.9)
    expected = copy.deepcopy(net.state_dict())
    for _ in range(3):
        with torch.no_grad():
            for parameter in net.parameters():
                parameter.add_(torch.randn_like(parameter))
            net[1].num_batches_tracked.add_(1)
        average.update()
        for name, value in net.state_dict().items():
            if value.is_floating_point():
                expected[name] += 0.1 * (value - expected[name])
            else:
                expected[name] = value.clone()
    for name, value in average.model.state_dict().items():
        torch.testing.assert_close(value, expected[name])
    assert not any(parameter.requires_grad for parameter in average.model.parameters())


def groups_of(**settings):
    optimizer = make_optimizer(partial(torch.optim.AdamW, lr=0.1, weight_decay=0.5), model(), device=CPU, **settings)
    found = []
    for group in optimizer.param_groups:
        shapes = [tuple(parameter.shape) for parameter in group["params"]]
        found.append((shapes, group["lr"], group["weight_decay"]))
    return found


def test_groups_have_settings_first_match_wins():
    found = groups_of(groups=[{"match": "2.bias", "lr": 0.3}, {"match": "2", "lr": 0.2, "weight_decay": 0.1}])
    assert found == [([(8, 4), (8,), (8,), (8,)], 0.1, 0.5), ([(2,)], 0.3, 0.5), ([(2, 8)], 0.2, 0.1)]


def test_norms_and_biases_do_not_decay():
    found = groups_of(no_decay="norms_and_biases", groups=[{"match": "2.*", "lr": 0.2}])
    assert found == [([(8, 4)], 0.1, 0.5), ([(8,)] * 3, 0.1, 0.0), ([(2, 8)], 0.2, 0.5), ([(2,)], 0.2, 0.0)]


def test_group_names_are_of_users_model():
    net = nn.ModuleDict({"model": model()})
    make = partial(torch.optim.SGD, lr=0.1)
    optimizer = make_optimizer(make, net, device=CPU, groups=[{"match": "0", "lr": 0.2}], prefix="model.")
    assert [len(group["params"]) for group in optimizer.param_groups] == [4, 2]


@pytest.mark.parametrize(
    ("settings", "asked", "so", "write"),
    [
        ({"groups": [{"match": "layer.*"}]}, "optimizer.groups: layer.*", "matches no parameter", "begin with 0, 1, 2"),
        ({"groups": [{"match": "2.wieght"}]}, "optimizer.groups: 2.wieght", "0.weight, 0.bias", "2.weight"),
        (
            {"groups": [{"match": "2", "weight_decy": 1}]},
            "optimizer.groups[0].weight_decy=1",
            "no setting",
            "weight_decay",
        ),
    ],
)
def test_invalid_group_is_refused(settings, asked, so, write):
    (problem,) = problems_of(groups_of, **settings)
    assert problem.source == asked
    assert so in problem.message
    assert write in problem.help


def test_no_decay_without_weight_decay_is_refused():
    class Plain(torch.optim.SGD):
        def __init__(self, params, lr):
            super().__init__(params, lr=lr)

    with pytest.raises(RunnerError, match="no setting weight_decay"):
        make_optimizer(partial(Plain, lr=1.0), model(), device=CPU, no_decay="norms_and_biases")


def test_frozen_layers_stay_as_they_are():
    net = model()
    freeze(net, ["[01]"])
    before = copy.deepcopy(net.state_dict())
    net.train()
    optimizer = make_optimizer(partial(torch.optim.SGD, lr=0.1), net, device=CPU)
    net(torch.randn(16, 4)).square().sum().backward()
    optimizer.step()
    changed = [name for name, value in net.state_dict().items() if not torch.equal(value, before[name])]
    assert changed == ["2.weight", "2.bias"] and len(optimizer.param_groups[0]["params"]) == 2
    assert (net.training, net[1].training) == (True, False)
    average = AveragedWeights(net, decay=0.9).model.train()
    assert not average[1].training
    assert average[1] is not net[1]


def test_norm_counts_if_it_is_trained_in_part():
    net = model()
    freeze(net, ["1.weight"])
    assert net.train()[1].training
    plain = nn.BatchNorm1d(2, affine=False)
    net = nn.Sequential(nn.Sequential(nn.Linear(2, 2), copy.deepcopy(plain)), nn.Linear(2, 2), copy.deepcopy(plain))
    freeze(net, ["0"])
    assert not net.train()[0][1].training and net[2].training
    freeze(net, ["2"])  # without weights, by its own name
    assert not net.train()[2].training and net[1].weight.requires_grad


def test_nothing_left_to_train():
    with pytest.raises(RunnerError, match="nothing to train") as caught:
        freeze(model(), ["*"])
    assert caught.value.problems[0].source == "model.freeze=[*]"


def test_on_mps_fp16_takes_no_fused_kernel():
    """A fused kernel would step on scaled gradients, and on infinite ones."""
    made = [
        make_optimizer(
            lambda parameters, fused=None: fused, model(), device=torch.device("mps"), may_skip=name == "fp16"
        )
        for name in ("fp32", "bf16", "fp16")
    ]
    assert made == [True, True, None]


def weights_after_an_overflow(optimizer, net):
    """Take three steps with fp16's scaler, with infinite first gradients, while fresh memory is filled with NaN."""
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    torch.use_deterministic_algorithms(True)
    try:
        for factor in (math.inf, 1.0, 0.5):
            loss = net(torch.linspace(-1, 1, 12).view(3, 4)).square().mean() * factor
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    finally:
        torch.use_deterministic_algorithms(False)
    return [value.detach().clone() for value in net.parameters()]


@pytest.mark.parametrize("dampening", [0.0, 0.5])
@pytest.mark.parametrize("in_turn", [False, True])
def test_skipped_fp16_step_leaves_sgd_momentum(dampening, in_turn):
    settings = {"lr": 0.1, "momentum": 0.9, "dampening": dampening, "weight_decay": 0.01}
    nets = [nn.Linear(4, 2, device="cpu") for _ in range(2)]
    nets[1].load_state_dict(nets[0].state_dict())
    make = partial(torch.optim.SGD, **settings)
    made = make_optimizer(make, nets[0], device=CPU, may_skip=True)
    assert (made.defaults["fused"] is True) == (not dampening)
    if in_turn:
        Turns({"one": made}, {"one": 1})
    plain = torch.optim.SGD(nets[1].parameters(), **settings, fused=False)
    ours, theirs = weights_after_an_overflow(made, nets[0]), weights_after_an_overflow(plain, nets[1])
    for one, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(one, other)


def test_fused_dampened_momentum_with_fp16_is_refused():
    make = partial(torch.optim.SGD, lr=0.1, momentum=0.9, dampening=0.5, fused=True)
    problems = problems_of(make_optimizer, make, model(), device=CPU, may_skip=True)
    assert "optimizer.fused=null" in problems[0].help
    make_optimizer(make, model(), device=CPU, may_skip=False)


class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.other = nn.Linear(2, 2, bias=False), nn.Linear(2, 2, bias=False)
        self.other.weight = self.one.weight
        self.phase = nn.Parameter(torch.zeros(3, dtype=torch.complex64))

    def get_extra_state(self):
        return {"words": "no tensor"}

    def set_extra_state(self, state):
        pass


def test_tied_and_complex_weights_are_averaged_once():
    net = Tied()
    with torch.no_grad():
        net.one.weight.zero_()
        average = AveragedWeights(net, decay=0.9)
        net.one.weight.fill_(1.0)
        net.phase.fill_(1.0 + 1.0j)
        average.update()
    assert average.model.one.weight is average.model.other.weight
    assert torch.allclose(average.model.one.weight, torch.tensor(0.1))
    assert torch.allclose(average.model.phase, torch.tensor(0.1 + 0.1j))


@pytest.mark.filterwarnings("ignore:.*weight_norm.*:FutureWarning")
def test_uncopyable_model_has_no_average():
    net = torch.nn.utils.weight_norm(nn.Linear(2, 2))
    with pytest.raises(RunnerError, match=r"train.ema_decay=0.9(.|\n)*parametrizations"):
        AveragedWeights(net, decay=0.9)

"""Steps of optimizers that take turns; tests/whole_runs/test_turns.py compares a run with the textbook's GAN loop."""

import copy
from functools import partial

import pytest
import torch

from runner.device.precision import make_precision
from runner.models.gan import GAN
from runner.tasks.adversarial import Adversarial
from runner.tasks.custom import Own
from runner.training.optimizer import AveragedWeights, Turns
from runner.training.step.compiled import make_compiled
from runner.training.step.on_device import Compiling
from runner.training.step.train_step import StepOptions, make_step

CPU = torch.device("cpu")
FP32 = make_precision("fp32", device=CPU)
LOSSES = ("loss", "loss_critic", "loss_generator")


def gan():
    torch.manual_seed(0)
    return GAN(2, 3, hidden_sizes=[16])


def batches(num, rows=32):
    draw = torch.Generator().manual_seed(1)
    return [(torch.randn(rows, 2, generator=draw),) for _ in range(num)]


def optimizers(model):
    return {
        "critic": torch.optim.SGD(model.critic.parameters(), lr=0.1, momentum=0.9),
        "generator": torch.optim.Adam(model.generator.parameters(), lr=0.01, betas=(0.5, 0.999), fused=True),
    }


def in_turns(model, groups, *, every=1, make=make_step, optimizer=None, **settings):
    torch.manual_seed(2)
    optimizer = optimizer or Turns(optimizers(model), {"critic": 1, "generator": every})
    step = make(model, Adversarial(), optimizer=optimizer, precision=FP32, **settings)
    told = []
    for group in groups:
        values = step([group])
        told.append([values[name].item() for name in LOSSES])
        assert all(parameter.grad is None for parameter in model.parameters())
    return told


def assert_same(model, other):
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


def with_one_fake(model, batch, turn=None, shared=None):
    """Return the losses of two optimizers; the critic's turn creates the fake rows for both."""
    if turn == "critic":
        shared["fake"] = model.generator(torch.randn(len(batch[0]), 3))
        real, fake = model.critic(batch[0]), model.critic(shared["fake"].detach())
        return {"loss": torch.nn.functional.softplus(fake - real).mean()}
    return {"loss": -model.critic(shared["fake"]).mean()}


@pytest.mark.parametrize("num", [1, 2])
def test_turns_share_tensors_of_each_batch(num):
    model, other = gan(), gan()
    optimizer = Turns(optimizers(model), {"critic": 1, "generator": 1})
    step = make_step(model, Own(with_one_fake), optimizer=optimizer, precision=FP32)
    torch.manual_seed(2)
    for at in range(5):
        step(batches(5 * num)[at * num :][:num])
        assert not optimizer.shared

    critic, generator = optimizers(other).values()
    torch.manual_seed(2)
    for at in range(5):
        group, fakes = batches(5 * num)[at * num :][:num], []
        for (real,) in group:
            fakes.append(other.generator(torch.randn(len(real), 3)))
            loss = torch.nn.functional.softplus(other.critic(fakes[-1].detach()) - other.critic(real)).mean()
            (loss / num).backward()
        critic.step()
        for fake in fakes:
            (-other.critic(fake).mean() / num).backward(inputs=list(other.generator.parameters()))
        generator.step()
        other.zero_grad()
    assert_same(model, other)


def test_turn_not_due_keeps_values_and_weights():
    model = gan()
    optimizer = Turns(optimizers(model), {"critic": 1, "generator": 2})
    step = make_step(model, Adversarial(), optimizer=optimizer, precision=FP32, clip_grad_norm=1.0)
    (first, second, third) = batches(3)
    before = step([first])
    assert list(before) == [*LOSSES[:2], "grad_norm_critic", LOSSES[2], "grad_norm_generator"]
    weights = copy.deepcopy(model.generator)
    after = step([second])
    assert after["loss_generator"] is before["loss_generator"]
    assert after["loss_critic"] != before["loss_critic"]
    assert after["loss"] == after["loss_critic"] + after["loss_generator"]
    assert_same(model.generator, weights)
    assert step([third])["loss_generator"] is not before["loss_generator"]


def test_turns_state_resumes_in_new_optimizers():
    whole, first = gan(), gan()
    expected = in_turns(whole, batches(7), every=3)
    optimizer = Turns(optimizers(first), {"critic": 1, "generator": 3})
    told = in_turns(first, batches(7)[:2], optimizer=optimizer)
    drawn = torch.get_rng_state()
    again = gan()
    again.load_state_dict(copy.deepcopy(first.state_dict()))
    taken_up = Turns(optimizers(again), {"critic": 1, "generator": 3})
    taken_up.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    assert taken_up.each["critic"].param_groups[0] is taken_up.param_groups[0]
    step = make_step(again, Adversarial(), optimizer=taken_up, precision=FP32)
    torch.set_rng_state(drawn)
    for group in batches(7)[2:]:
        values = step([group])
        told.append([values[name].item() for name in LOSSES])
    assert told == expected
    assert_same(again, whole)


def test_a_schedule_moves_the_rates_of_all():
    optimizer = Turns(optimizers(gan()), {"critic": 1, "generator": 1})
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    optimizer.step()
    schedule.step()
    assert [each.param_groups[0]["lr"] for each in optimizer.each.values()] == [0.05, 0.005]


def test_turns_accumulated_batches_count_as_one():
    model, other = gan(), gan()
    (whole,) = batches(1)
    halves = [(half,) for half in whole[0].split(16)]

    def make(model, *args, **settings):
        step = make_step(model, *args, **settings)
        return lambda groups: step(groups if groups[0] is whole else halves)

    told = in_turns(model, [whole], make=make)
    split = in_turns(other, [None], make=make)
    torch.testing.assert_close(told, split)
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


def test_the_average_is_updated_once_a_step():
    model = gan()
    average, before = AveragedWeights(model, decay=0.5), model.critic.output.weight.detach().clone()
    in_turns(model, batches(1), average=average)
    torch.testing.assert_close(average.model.critic.output.weight, (before + model.critic.output.weight.detach()) / 2)


@pytest.fixture
def traced(monkeypatch):
    """Trace and differentiate as usual, but run torch's kernels, as compiling C++ takes seconds."""
    torch._dynamo.reset()
    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend="aot_eager"))
    yield
    torch._dynamo.reset()


def test_forward_pass_of_each_turn_is_compiled(traced):
    said, model, other = [], gan(), gan()

    def make(model, task, *, optimizer, precision):
        def one(**options):
            return make_step(model, task, optimizer=optimizer, precision=precision, options=StepOptions(**options))

        kind = Compiling(in_part="several optimizers take turns")
        return make_compiled(one, optimizer=optimizer, is_first=True, kind=kind, say=said.append)

    told, expected = in_turns(model, batches(5), make=make), in_turns(other, batches(5))
    torch.testing.assert_close(told, expected)
    assert said == ["compile: only the forward pass, as several optimizers take turns"]

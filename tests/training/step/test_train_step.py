import copy

import pytest
import torch
from torch import nn

from runner.data.loading.batches import Shard
from runner.data.loading.loaders import Resident
from runner.device.precision import make_precision
from runner.inspection.findings import merged
from runner.inspection.guard import Guard
from runner.tasks.classification import Classification
from runner.tasks.language import Language
from runner.tasks.regression import Regression
from runner.training.evaluate import evaluate, make_eval_step
from runner.training.optimizer import AveragedWeights
from runner.training.step.train_step import make_step

CPU = torch.device("cpu")


def net(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 3))


def rows(count=60):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(count, 6, generator=generator), torch.randint(3, (count,), generator=generator)


def make(model, optimizer=None, name="fp32", **settings):
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1)
    return make_step(
        model, Classification(), optimizer=optimizer, precision=make_precision(name, device=CPU), **settings
    )


def test_step_is_bitwise_identical_to_textbook():
    model, other = net(), net()
    inputs, targets = rows()
    values = make(model)([(inputs, targets)])
    optimizer = torch.optim.SGD(other.parameters(), lr=0.1)
    loss = nn.functional.cross_entropy(other(inputs), targets)
    loss.backward()
    optimizer.step()
    assert values["loss"].item() == loss.item()
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(model.parameters(), other.parameters(), strict=True))
    assert not values["loss"].requires_grad
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.mark.parametrize("cuts", [(20, 20, 20), (25, 25, 10)])
def test_accumulated_batches_count_by_their_rows(cuts):
    model, other = net(), net()
    inputs, targets = rows()
    batches = list(zip(inputs.split(cuts), targets.split(cuts), strict=True))
    values, whole = make(model)(batches), make(other)([(inputs, targets)])
    torch.testing.assert_close(values["loss"], whole["loss"])
    torch.testing.assert_close(values["accuracy"], whole["accuracy"])
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("size", [1, 2, 4])
def test_accumulated_padded_batches_weigh_by_tokens(size):
    draw = torch.Generator().manual_seed(0)
    tokens, targets = (torch.randint(5, (4, 6), generator=draw) for _ in range(2))
    targets[torch.arange(6) >= torch.tensor([6, 2, 0, 1])[:, None]] = -100

    def learnt(batches):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Embedding(5, 8), nn.Linear(8, 5))
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        values = make_step(model, Language(), optimizer=optimizer, precision=make_precision("fp32", device=CPU))(
            batches
        )
        return dict(values), model.state_dict()

    cut = list(zip(tokens.split(size), targets.split(size), strict=True))
    torch.testing.assert_close(learnt(cut), learnt([(tokens, targets)]))


def test_step_with_zero_count_learns_nothing():
    model = nn.Embedding(5, 5)
    before, nothing = model.weight.detach().clone(), (torch.ones(2, 3).long(), torch.full((2, 3), -100))
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    step = make_step(model, Language(), optimizer=optimizer, precision=make_precision("fp32", device=CPU))
    assert step([nothing, nothing])["loss"].item() == 0 and torch.equal(model.weight, before)


def test_clipping_reports_old_norm_and_bounds_step():
    model = net()
    before = copy.deepcopy(model)
    norm = make(model, clip_grad_norm=0.01)([rows()])["grad_norm"]
    moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before.parameters(), strict=True)]).norm()
    assert norm > 0.01
    assert moved.item() == pytest.approx(0.1 * 0.01, rel=1e-2)


def test_scaled_gradients_are_unscaled_before_clipping():
    """fp16's gradients are 65,536 times too large until they are unscaled; clipping before that leaves almost nothing."""
    found = {}
    for name in ("fp32", "fp16"):
        model = net()
        before = [parameter.detach().clone() for parameter in model.parameters()]
        norm = make(model, name=name, clip_grad_norm=0.1)([rows()])["grad_norm"]
        moved = torch.cat([(a - b).flatten() for a, b in zip(model.parameters(), before, strict=True)]).norm()
        found[name] = norm.item(), moved.item()
    assert found["fp32"][0] > 0.1
    assert found["fp16"] == pytest.approx(found["fp32"], rel=0.01)


@pytest.mark.parametrize("name", ["bf16", "fp16"])
def test_half_precision_learns_with_float32_weights(name):
    model = net()
    step = make(model, torch.optim.Adam(model.parameters(), lr=0.01, fused=True), name=name)
    losses = [step([rows()])["loss"].item() for _ in range(60)]
    assert losses[-1] < 0.7 * losses[0]
    assert all(parameter.dtype == torch.float32 for parameter in model.parameters())


def test_the_average_is_updated_after_the_step():
    model = net()
    average = AveragedWeights(model, decay=0.5)
    before = model[0].weight.detach().clone()
    make(model, average=average)([rows()])
    torch.testing.assert_close(average.model[0].weight, (before + model[0].weight.detach()) / 2)


def test_evaluation_counts_rows_once_keeps_training_mode():
    model = nn.Sequential(nn.Dropout(0.5), net())
    inputs, targets = rows(50)
    batches = Resident((inputs, targets), batch_size=16, device=CPU, seed=0, shuffle=False)
    values = evaluate(model, Classification(), batches.epoch(0), precision=make_precision("fp32", device=CPU))
    logits = model.eval()(inputs)
    assert values["loss"] == pytest.approx(nn.functional.cross_entropy(logits, targets).item(), rel=1e-5)
    assert values["accuracy"] == pytest.approx((logits.argmax(1) == targets).float().mean().item())
    model.train()
    evaluate(model, Classification(), batches.epoch(0), precision=make_precision("fp32", device=CPU))
    assert model.training
    model.eval()
    evaluate(model, Classification(), batches.epoch(0), precision=make_precision("fp32", device=CPU))
    assert not model.training


def test_several_processes_evaluate_as_whole_split():
    """Each process counts its rows of a batch; with 50 rows in batches of 16, 3 processes have different numbers of them."""
    model, sums = net(), []
    batches = Resident(rows(50), batch_size=16, device=CPU, seed=0, shuffle=False)

    def reached(shard=None, total=None):
        parts = batches.epoch(0, shard=shard)
        return evaluate(model, Classification(), parts, precision=make_precision("fp32", device=CPU), total=total)

    for rank in (2, 1):
        reached(Shard(rank, 3), lambda own: sums.append(own) or own)
    assert reached(Shard(0, 3), lambda own: own + sum(sums)) == pytest.approx(reached(), rel=1e-6)


class Reader(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = net()

    def forward(self, inputs):
        if inputs.sum() > 1e9:  # reads the device
            return inputs
        return self.inner(inputs)


@pytest.mark.parametrize(("guard", "found"), [("first_step", 1), ("always", 3), ("off", 0)])
def test_guard_reports_reads_in_step(guard, found):
    model = Reader()
    watch = Guard(CPU, when=guard, model=model, task=Classification())
    step = watch.on(make(model), of_groups=True)
    for _ in range(3):
        step([rows()])
    assert len(watch.findings) == found
    assert all(finding.line.startswith("tests/training/step/test_train_step.py:") for finding in watch.findings)
    assert [finding.count for finding in merged(watch.findings)] == ([found] if found else [])


def gathering(**settings):
    return Classification(
        num_classes=3, metrics={"right": lambda said, true: (said.argmax(1) == true).float().mean()}, **settings
    )


@pytest.mark.parametrize("size", [60, 16, 7])
def test_metrics_do_not_depend_on_batches(size):
    inputs, targets = rows(60)
    model, batches = net(), Resident((inputs, targets), batch_size=size, device=CPU, seed=0, shuffle=False)
    values = evaluate(model, gathering(), batches.epoch(0), precision=make_precision("fp32", device=CPU))
    assert list(values) == ["loss", "accuracy", "right"]
    expected = (model(inputs).argmax(1) == targets).float().mean().item()
    assert values["right"] == pytest.approx(values["accuracy"], rel=1e-6) == pytest.approx(expected)


def test_derived_values_are_of_whole_split():
    inputs, targets = rows(50)[0], torch.randn(50, 3)
    batches = Resident((inputs, targets), batch_size=16, device=CPU, seed=0, shuffle=False)
    values = evaluate(net(), Regression(), batches.epoch(0), precision=make_precision("fp32", device=CPU))
    expected = nn.functional.mse_loss(net()(inputs), targets).sqrt().item()
    assert values["rmse"] == pytest.approx(expected, rel=1e-6)


def test_task_dropout_is_off_in_evaluation():
    class Noisy(nn.Module):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, model, batch):
            return {"loss": self.dropout(model(batch[0])).square().mean()}

    task, model = Noisy(), net()
    values = evaluate(model, task, [rows()], precision=make_precision("fp32", device=CPU))
    assert values["loss"] == pytest.approx(model(rows()[0]).square().mean().item(), rel=1e-6)
    assert task.training


def test_the_guard_looks_at_metrics_too():
    class Reads:
        def update(self, said, true):
            self.sum = said.mean() if said.sum() > 0 else said.sum()

        def compute(self):
            return self.sum

        def reset(self):
            pass

    task = Classification(num_classes=3, metrics={"own": Reads()})
    watch = Guard(CPU, when="first_step", model=net(), task=task)
    judge = watch.on(make_eval_step(task, precision=make_precision("fp32", device=CPU)))
    evaluate(net(), task, [rows(), rows()], precision=make_precision("fp32", device=CPU), eval_step=judge)
    assert [finding.line.split(":")[0] for finding in watch.findings] == ["tests/training/step/test_train_step.py"]

"""The step never reads the device: checked on any machine, and every mutation that reads fails the test.

On the CPU, runner.inspection.host_reads watches instead of the device; with `--device cuda:0`, torch's sync detector is also
active. Never skipped.
"""

import contextlib
import inspect
import types
import warnings

import pytest
import torch
from torch import nn

import runner.training.step.train_step
from runner.data.loading.loaders import Resident, Streamed
from runner.device.precision import make_precision
from runner.inspection.host_reads import HostReads
from runner.tasks.classification import Classification
from runner.training.background import Background
from runner.training.loop import Best, Loop, Progress, train
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import AveragedWeights, make_optimizer
from runner.training.schedule import Rates, Schedule, warmup_cosine
from runner.training.signals import Stop
from runner.training.stopping import Limits, OwnStopCondition

NUM_STEPS = 12


@contextlib.contextmanager
def detector(device):
    """torch's detector: any wait of the host for the device is an error."""
    if device.type != "cuda":
        yield
        return
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that it is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def reads_of(device, *, train_step=runner.training.step.train_step, loader=Resident, name="fp32"):
    """Return the reads of a training of some steps, from its first batch to its last row in the buffer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Dropout(0.1), nn.Linear(16, 3)).to(device)
    optimizer = make_optimizer(torch.optim.Adam, model, device=device)
    rows = torch.randn(100, 8), torch.randint(3, (100,))
    background = Background()
    buffer = MetricBuffer(device, lambda window: None, background=background, pull_every=1000)
    take = train_step.make_step(
        model,
        Classification(),
        optimizer=optimizer,
        precision=make_precision(name, device=device),
        clip_grad_norm=1.0,
        average=AveragedWeights(model, decay=0.9),
    )
    batches = loader(rows, batch_size=10, device=device, seed=0, shuffle=True)
    limits = Limits(num_epochs=9, num_steps=NUM_STEPS)
    try:
        with HostReads(device) as watch, detector(device):
            schedule = warmup_cosine(optimizer, num_steps=NUM_STEPS)
            progress = Progress(Best("val/loss", "min"))
            rates = Rates(optimizer, Schedule(schedule), buffer=buffer, progress=progress)
            stop = OwnStopCondition(Stop(), limits)
            train(
                train_step.EagerSteps(take, batches, accumulate_steps=2, rates=rates, buffer=buffer),
                Loop(progress, limits, 5, evaluate=dict, save=lambda name: None, stop=stop),
            )
    finally:
        batches.close()
        background.close()
    return [str(read) for read in watch.reads]


@pytest.mark.parametrize("name", ["fp32", "bf16", "fp16"])
@pytest.mark.parametrize(("loader", "copies"), [(Resident, 3), (Streamed, 10**9)], ids=["resident", "streamed"])
def test_a_training_reads_nothing(device, loader, copies, name):
    found = reads_of(device, loader=loader, name=name)
    # each epoch's permutation, or streamed batches; on CUDA they are copied from pinned memory without waiting
    towards = [read for read in found if "a copy from the host" in read]
    assert [read for read in found if read not in towards] == []
    assert len(towards) <= (0 if device.type == "cuda" else copies)


def mutated(module, before, after):
    """Return a new module: the given one, with one line of its source changed."""
    source = inspect.getsource(module)
    assert source.count(before) == 1, f"{before!r} stands {source.count(before)} times in {module.__name__}"
    new = types.ModuleType(module.__name__)
    new.__file__ = module.__file__
    exec(compile(source.replace(before, after), f"mutated_{module.__name__}.py", "exec"), new.__dict__)
    return new


WRITE = "self._buffer.write(self.step(group))"
NORM = "return _with_norm(values, apply_update())"
#: ways in which a step can pass a value to Python
READS = {
    "loss.item()": "values['loss'].item()",
    "if loss > x": "1 if values['loss'] > 9 else 0",
    "f-string": "f\"{values['loss']:.3f}\"",
    "print": "repr(values['loss'])",
    "tolist": "values['loss'].tolist()",
    "cpu": "values['loss'].cpu()",
}
MUTATIONS = {
    name: (runner.training.step.train_step, WRITE, f"values = self.step(group); {read}; self._buffer.write(values)")
    for name, read in READS.items()
} | {
    "float(grad_norm)": (
        runner.training.step.train_step,
        NORM,
        "norm = apply_update(); float(norm); return _with_norm(values, norm)",
    ),
    "numpy": (
        runner.training.step.train_step,
        NORM,
        "norm = apply_update(); norm.numpy(); return _with_norm(values, norm)",
    ),
}


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mutation_that_reads_is_caught(device, mutation):
    module, before, after = MUTATIONS[mutation]
    new = mutated(module, before, after)
    try:
        found = reads_of(device, **{module.__name__.rpartition(".")[2]: new})
    except (RuntimeError, TypeError) as error:  # from the detector of a real device, or numpy() there
        assert "synchroniz" in str(error) or "to numpy" in str(error)
    else:
        assert len(found) >= NUM_STEPS

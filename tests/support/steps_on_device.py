"""A training whose steps read all changing values on the device, compared with the same training step by step."""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from runner.data.loading.batches import BatchTransform, Resident
from runner.device.precision import make_precision
from runner.tasks.classification import Classification
from runner.training.background import Background
from runner.training.loop import Best, Loop, Progress, train
from runner.training.metric_buffer import MetricBuffer
from runner.training.optimizer import AveragedWeights
from runner.training.schedule import Rates, Schedule
from runner.training.signals import Stop
from runner.training.step.on_device import OnDevice
from runner.training.step.train_step import EagerSteps, StepOptions, make_step
from runner.training.stopping import Limits, OwnStopCondition


class Net(nn.Sequential):
    def __init__(self):
        super().__init__(nn.Flatten(), nn.Linear(16, 8, bias=False), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3))


#: rates that are exact in 32 bits, as a GPU's kernels read them, so that steps are bitwise identical there, too
ADAM = partial(torch.optim.Adam, lr=2**-7, fused=True)
SETTINGS = {
    "adam": {},
    "accumulated, clipped, averaged": {
        "accumulate": 3,
        "clip": 0.5,
        "ema": 0.9,
        "schedule": partial(StepLR, step_size=1, gamma=0.5),
        "rate_every": 13,  # by epoch
    },
    "a schedule": {"schedule": lambda opt: OneCycleLR(opt, max_lr=0.1, total_steps=200, cycle_momentum=False)},
    "sgd with momentum": {"optimizer": partial(torch.optim.SGD, lr=2**-3, momentum=0.9, fused=True)},
    "groups": {
        "optimizer": lambda parameters: ADAM(
            [{"params": (listed := list(parameters))[:2]}, {"params": listed[2:], "lr": 2**-3, "weight_decay": 0.1}]
        )
    },
    "augmented": {"augmented": True},
    "a checkpoint each eleven steps": {"limits": {"save_every_steps": 11}},  # more than a replay has
    "means of three": {"every": 3},
    "in the middle of an epoch": {"limits": {"num_steps": 23}},
}


def trained(device, *, repeater=None, kind=None, task=None, goes_on=False, **settings):
    """Return every window's rows and notes, the weights, and the steps at which a checkpoint was taken. settings: See SETTINGS."""
    task = task or Classification()
    torch.manual_seed(0)
    model = Net().to(device)
    average = AveragedWeights(model, decay=settings["ema"]) if "ema" in settings else None
    opt = settings.get("optimizer", ADAM)(model.parameters())
    draw = torch.Generator().manual_seed(0)
    rows = torch.rand(150, 1, 4, 4, generator=draw), torch.randint(3, (150,), generator=draw)
    data = Resident(rows, batch_size=4, device=device, seed=0, shuffle=True)
    if settings.get("augmented"):
        data.transform = BatchTransform(Shift().to(device), device=device, seed=0, is_training=True)
    accumulate, every = settings.get("accumulate", 1), settings.get("every", 1)
    windows, kept = [], []
    background = Background()
    buffer = MetricBuffer(device, windows.append, background=background, pull_every=20, every=every)
    if goes_on:
        buffer.load_state({"names": ["train/loss", "train/accuracy"], "rows": torch.zeros(0, 2), "notes": {}})
    progress = Progress(best=Best("val/loss", "min"))
    bounds = Limits(**{"num_epochs": 3, "num_steps": 10_000, **settings.get("limits", {})})
    chosen = {"optimizer": opt, "precision": make_precision("fp32", device=device), "average": average}

    def make(**more):
        return make_step(model, task, **chosen, clip_grad_norm=settings.get("clip"), options=StepOptions(**more))

    schedule = Schedule(
        settings["schedule"](opt) if "schedule" in settings else None, every=settings.get("rate_every", 1)
    )
    rates = Rates(opt, schedule, buffer=buffer, progress=progress)
    epochs = EagerSteps(make(), data, accumulate_steps=accumulate, rates=rates, buffer=buffer)
    if repeater is not None:
        epochs = OnDevice(make, make(), epochs, repeater=repeater, limits=bounds, kind=kind)

    def keep(_):
        kept.append((progress.step, {name: value.tolist() for name, value in model.state_dict().items()}))

    stop = OwnStopCondition(Stop(), bounds)
    per_epoch = -(-data.num_batches // accumulate)
    try:
        train(epochs, Loop(progress, bounds, per_epoch, evaluate=dict, save=keep, stop=stop))
        buffer.pull()
        background.wait()
    finally:
        background.close()
    pairs = [zip(window.steps.tolist(), window.values.tolist(), strict=True) for window in windows]
    found = [(step, *row) for window in pairs for step, row in window]
    notes = [point for window in windows for point in window.notes.get("train/lr", [])]
    weights = {name: value.tolist() for name, value in (average.model if average else model).state_dict().items()}
    return {"rows": found, "notes": notes, "weights": weights, "kept": kept, "steps": progress.step}


class Shift(nn.Module):
    """Its randomness comes from the draws."""

    num_draws = 2

    def forward(self, batch, draws):
        return batch[0] + draws[:, :1, None, None], batch[1]

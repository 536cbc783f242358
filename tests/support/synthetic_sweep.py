"""Generated sweeps on disk, like those of the runner: ledger, summaries, journals. The same arguments give the same bytes."""

import json
import math

import numpy as np

from runner.sweep.jobs.ledger import Job, Ledger, Sweep
from runner.tracking.journal import Journal

BEGAN_MS = 1_790_000_000_000
SPEEDS = {"cpu": 21_000.0, "cuda:0": 480_000.0, "cuda:1": 455_000.0}
BATCH_ROWS = 128


class Folder:
    """A sweep's directory to which jobs are added; close it before reading."""

    def __init__(self, folder, words=("device=cpu,cuda:0", "seed=1,2"), objectives=()):
        self.path = folder
        self.ledger = Ledger(folder)
        self.ledger.begin(Sweep(folder, "0" * 32, BEGAN_MS, tuple(words), tuple(objectives)))
        self.number = 0

    def job(self, overrides, state="finished", *, name=None, error=None, summary=None, device=None, trial=None):
        """Add a job without a journal. summary: The relevant keys of summary.json, or None if the job did not write it."""
        number, self.number = self.number, self.number + 1
        name = name or " ".join(overrides).replace("\\", "")
        job = Job(number, tuple(overrides), name, folder_name=str(number), trial=trial)
        self.ledger.plan(job)
        if state != "planned":
            job.state, job.device, job.error = state, device, error
            self.ledger.note(job)
        if summary is not None:
            (self.path / str(number)).mkdir()
            (self.path / str(number) / "summary.json").write_text(json.dumps(_whole(summary, state, device)))
        return number

    def close(self):
        self.ledger.close()
        return self.path


def _whole(summary, state, device):
    whole = {"status": state, "error": None, "run_id": None, "device": device, "num_epochs": 0, "num_steps": 0}
    whole |= {"metrics": {}, "best": {"metric": "val/accuracy", "mode": "max", "value": None, "step": 0}}
    whole |= {"seconds": {"start": 0.1, "setup": 0.4, "train": 0.0, "evaluate": 0.0}}
    return whole | {"steps_per_second": 0.0, "samples_per_second": 0.0} | summary


def train(
    sweep,
    overrides,
    *,
    seed=0,
    rate=0.01,
    floor=0.1,
    device="cpu",
    num_steps=600,
    num_epochs=6,
    stop_after=None,
    num_windows=6,
    **job,
):
    """Add a trained job: a noisy loss that falls to `floor`, an accuracy that rises, with the device's speed."""
    random = np.random.default_rng(seed)
    steps = np.arange(1, num_steps + 1)
    noise = np.exp(random.normal(0, 0.18, num_steps))
    loss = ((2.3 - floor) * np.exp(-steps * rate) + floor) * noise
    if device != "cpu":
        loss = loss * (1 + 1e-7 * np.cumsum(np.random.default_rng(seed + 1000).normal(size=num_steps)))
    ends = (np.arange(1, num_epochs + 1) * num_steps) // num_epochs
    accuracy = 1 - 0.22 * floor - 0.9 * np.exp(-ends * rate) + random.normal(0, 0.004, num_epochs)
    ends, accuracy = ends[:stop_after], accuracy[:stop_after]
    steps, loss = steps[: ends[-1]], loss[: ends[-1]]
    speed = SPEEDS[device] * (1 + random.normal(0, 0.02))
    times_ms = BEGAN_MS + 900 + (steps * BATCH_ROWS / speed * 1000).astype(int)
    best = int(np.argmax(accuracy))
    finished = stop_after is None
    tests = {"test/accuracy": accuracy[best] - 0.01, "test/loss": float(loss[-1]) * 1.1} if finished else {}
    last = {"train/loss": float(loss[-1]), "val/accuracy": float(accuracy[-1]), **tests}
    summary = {
        "run_id": f"{seed:032x}",
        "num_epochs": len(ends),
        "num_steps": len(steps),
        "metrics": {name: float(value) for name, value in last.items()},
        "best": {"metric": "val/accuracy", "mode": "max", "value": float(accuracy[best]), "step": int(ends[best])},
        "seconds": {"start": 0.1, "setup": 0.4, "train": len(steps) * BATCH_ROWS / speed, "evaluate": 0.2},
        "steps_per_second": speed / BATCH_ROWS,
        "samples_per_second": speed,
    }
    number = sweep.job(overrides, "finished" if finished else "pruned", device=device, summary=summary, **job)
    with Journal(sweep.path / str(number)) as journal:
        journal.event("start", uid=f"{number:032x}", start_ms=BEGAN_MS + 900)
        for window in np.array_split(np.arange(len(steps)), num_windows):
            journal.points(("train/loss",), steps[window], times_ms[window], loss[window, None])
        for end, value in zip(ends, accuracy, strict=True):
            journal.points(("val/accuracy",), [end], [times_ms[end - 1]], [[value]])
    return number


def grid(folder):
    """Write device x model x seed, with a job that failed, one that segfaulted and two that were skipped."""
    words = ("device=cpu,cuda:0,mps", "model=mlp,cnn", "seed=1,2,3", "train.num_epochs=6")
    sweep = Folder(folder, words)
    for device in ("cpu", "cuda:0"):
        for model, floor in (("mlp", 0.3), ("cnn", 0.08)):
            for seed in (1, 2, 3):
                overrides = (f"device={device}".replace(":", "\\:"), f"model={model}", f"seed={seed}")
                train(sweep, overrides, seed=seed + len(model) * int(floor * 100), floor=floor, device=device)
    why = "mps: this machine has no Apple GPU; here: cpu, cuda:0"
    sweep.job(("device=mps", "model=mlp", "seed=1"), "skipped", error=why)
    sweep.job(("device=mps", "model=cnn", "seed=1"), "skipped", error=why)
    why = "OutOfMemoryError: CUDA out of memory. Tried to allocate 42.00 GiB. GPU 0 has a total capacity of 139.80 GiB"
    sweep.job(("device=cuda\\:0", "model=huge", "seed=1"), "failed", device="cuda:0", error=why, summary={})
    why = "the process died of signal 11 (segmentation fault)"
    sweep.job(("device=cpu", "model=odd", "seed=1"), "killed", device="cpu", error=why)
    return sweep.close()


def search(folder, num_trials=40, *, objectives=({"metric": "val/accuracy", "direction": "maximize"},)):
    """Write a search over four keys: the better the rate and the width, the higher the accuracy; every fourth trial is pruned."""
    random = np.random.default_rng(7)
    words = ("optimizer.lr=interval(1e-5,1e-1)", "model.width=range(16,512)", "optimizer=adam,sgd")
    words += ("train.batch_size=32,64,128",)
    sweep = Folder(folder, (*words, f"sweep.num_trials={num_trials}"), objectives)
    for number in range(num_trials):
        rate = 10 ** random.uniform(-5, -1) if number < 12 else 10 ** random.normal(-2.4, 0.5)
        width = int(random.integers(16, 512))
        trial = {
            "optimizer.lr": rate,
            "model.width": width,
            "optimizer": str(random.choice(["adam", "sgd"])),
            "train.batch_size": int(random.choice([32, 64, 128])),
        }
        distance = abs(math.log10(rate) + 2.5)
        floor = 0.05 + 0.3 * distance + 0.25 * (1 - width / 512) + (0.1 if trial["optimizer"] == "sgd" else 0)
        overrides = tuple(f"{key}={value}" for key, value in trial.items())
        name = f"lr={rate:.3g} width={width} optimizer={trial['optimizer']} batch_size={trial['train.batch_size']}"
        pruned = number % 4 == 3 and distance > 0.3
        how = {"rate": 0.02 / (1 + 2 * distance), "floor": floor, "stop_after": 2 if pruned else None}
        train(sweep, overrides, seed=number, name=name, trial=trial, **how)
    why = "NotFiniteError: train/loss is nan at step 12"
    sweep.job(("optimizer.lr=0.9",), "failed", name="lr=0.9", error=why, device="cpu", summary={})
    return sweep.close()

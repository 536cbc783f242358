"""This project, by its command line, with the network and the data of all other peers.

--variant: any of all, compiled, graph, joined with +. --words: more overrides for our command line. In addition
to the fields of every peer: process_seconds (the whole command), publisher_cpu_seconds, seconds_after_last_step.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
import torch
import work_models
from omegaconf import OmegaConf
from work import LEARNING_RATE, SEED, Work, arguments, arrays, judged, peak_memory_bytes, say, stored_points

HERE = Path(__file__).parent
PUBLISHER = "runner.tracking"
WARM_STEPS = 100  # the journal has the time of each window's end; the times in between are interpolated
SWITCHES = {"all": "tracking.points=all", "compiled": "train.compile=true", "graph": "train.cuda_graph=true"}


def main() -> None:
    work = arguments()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        prepare(work, folder)
        command = [sys.executable, "-m", "runner", *words(work, folder)]
        began = time.time()
        publisher_cpu_seconds = run(command, folder)
        ended = time.time()
        summary = json.loads((folder / "run" / "summary.json").read_text())
        steps, times = journal(folder / "run")
        say(
            num_steps=summary["num_steps"],
            seconds=summary["seconds"]["train"],
            **steady(steps, times, warm_steps=max(WARM_STEPS, window_steps(folder / "run"))),
            points=stored_points(work),
            loss=judged(work, trained(work, folder / "run")),
            peak_memory_bytes=peak_memory_bytes(resource.RUSAGE_CHILDREN),
            import_seconds=summary["seconds"]["start"],
            process_seconds=ended - began,
            publisher_cpu_seconds=publisher_cpu_seconds,
            seconds_after_last_step=ended - times[-1],
        )


def prepare(work: Work, folder: Path) -> None:
    """Write a user's directory: the rows, the network's module and the file of conf/ that names it."""
    inputs, targets = arrays(work.size)
    np.savez(folder / "rows.npz", x=inputs, y=targets)
    shutil.copy(work_models.__file__, folder)
    (folder / "conf" / "model").mkdir(parents=True)
    (folder / "conf" / "model" / "net.yaml").write_text(f"_target_: work_models.Net\nsize: {work.size}\n")


def words(work: Work, folder: Path) -> list[str]:
    """Return the arguments after `python -m runner`, without anything that the other peers do not do."""
    switches = [SWITCHES[name] for name in work.variant.split("+") if name]
    net = f"data=arrays data.path=rows.npz data.val_fraction=0 data.test_fraction=0 model=net seed={SEED}"
    optimizer = f"optimizer=adam optimizer.lr={LEARNING_RATE} scheduler=constant train.num_steps={work.steps}"
    train = f"train.batch_size={work.batch_size} metrics.every={work.log_every or 1} task.plots=false"
    device = f"device={work.device} backends.cpu.num_threads={work.threads}"
    tracking = f"tracking.uri={work.uri} tracking.log_model=false tracking.system_metrics=false"
    flags = [
        f"data.float_inputs={str(work.size != 'transformer').lower()}",
        f"tracking.enabled={str(work.log_every > 0).lower()}",
        f"hydra.run.dir={folder}/run",
    ]
    return [*f"{net} {optimizer} {train} {device} {tracking}".split(), *flags, *switches, *work.words]


def run(command: list[str], folder: Path) -> float:
    """Run the command in the folder; return the publisher's CPU seconds. Its output is shown if it fails."""
    environment = {**os.environ, "PYTHONPATH": str(HERE.parents[2])}
    output, publisher, cpu_seconds = folder / "output.txt", None, 0.0
    with (
        output.open("wb") as file,
        subprocess.Popen(command, stdout=file, stderr=file, env=environment, cwd=folder) as process,
    ):
        while process.poll() is None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(0.1)
            with contextlib.suppress(psutil.Error):
                publisher = publisher or _publisher(process.pid)
                if publisher is not None:
                    times = publisher.cpu_times()
                    cpu_seconds = times.user + times.system
    if process.returncode:
        sys.exit(output.read_text(errors="replace"))
    return cpu_seconds


def _publisher(pid: int) -> psutil.Process | None:
    found = psutil.Process(pid).children()
    return next((child for child in found if PUBLISHER in (*child.cmdline(), child.name())), None)


def journal(folder: Path) -> tuple[np.ndarray, np.ndarray]:
    """Return the steps, and the seconds since 1970 at which they had ended."""
    sys.path.insert(0, str(HERE.parents[2]))
    from runner.tracking.journal_reader import read_series

    steps, times_ms, _ = read_series(folder)["train/loss"]
    return steps, times_ms / 1000


def window_steps(folder: Path) -> int:
    return OmegaConf.load(folder / ".hydra" / "config.yaml").metrics.pull_every


def steady(steps: np.ndarray, times: np.ndarray, *, warm_steps: int) -> dict[str, float | None]:
    """Return the speed without the first window, which includes the compilation."""
    later = np.flatnonzero(steps >= warm_steps)
    if not len(later) or steps[later[0]] == steps[-1]:
        return {"seconds_steady": None, "num_steps_steady": 0}
    first = later[0]
    return {"seconds_steady": times[-1] - times[first], "num_steps_steady": int(steps[-1] - steps[first])}


def trained(work: Work, folder: Path) -> torch.nn.Module:
    model = work_models.Net(work.size)
    state = torch.load(folder / "checkpoints" / "last.pt", map_location="cpu", weights_only=True)
    model.load_state_dict(state["model"])
    return model


if __name__ == "__main__":
    main()

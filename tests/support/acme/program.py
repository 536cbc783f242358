"""What a person does on a second kind of device, in one process: python program.py; its last line is what came of it, as JSON."""

from __future__ import annotations

import contextlib
import io
import json
import sys
from pathlib import Path

from runner import cli, run
from runner.data.loading import resident
from runner.errors import RunnerError
from runner.tracking.journal_reader import read_series
from runner.training import metric_buffer

WORDS = ["data=digits", "data.limit=600", "model=mlp", "train.batch_size=64", "train.num_epochs=2"]
WORDS += ["+optimizer.fused=false", "+optimizer.foreach=false", "metrics.pull_every=5", "tracking.enabled=false"]
WORDS += ["train.clip_grad_norm=1.0", "train.ema_decay=0.9"]


#: a model that makes a tensor on the CPU in its step, and a task that writes which threads compute gradients
OWN = """import json
import threading
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

def Threads():
    def step(model, batch):
        outputs = model(batch[0])
        if outputs.requires_grad:
            outputs.register_hook(note)
        return {"loss": F.cross_entropy(outputs, batch[1])}

    return step

def note(gradient):
    names = {gradient.device.type: threading.current_thread() is threading.main_thread()}
    Path("threads.json").write_text(json.dumps(names))

class Lost(nn.Module):
    def __init__(self):
        super().__init__()
        self.line = nn.Linear(64, 10)

    def forward(self, x):
        return self.line(x.flatten(1)) + torch.ones(10)
"""


def losses(folder: str) -> list[float]:
    return read_series(Path(folder))["train/loss"][2].tolist()


def main() -> None:
    found: dict[str, object] = {}
    resident.PIECE_BYTES = 2**16  # a split of two pieces and a rest
    sides = []
    made = metric_buffer.streams.side_stream
    metric_buffer.streams.side_stream = lambda device: sides.append(made(device)) or sides[-1]
    for name, more in {
        "cpu": ["device=cpu"],
        "acme": ["device=acme"],
        "second": ["device=acme:1", "data.residency=stream"],
        "auto": ["device=auto", "train.num_epochs=1"],
    }.items():
        with contextlib.redirect_stdout(io.StringIO()) as said:
            summary = run([*WORDS, *more], folder=name)
        found[name] = {
            key: summary[key] for key in ("status", "peak_memory_bytes", "guard", "device") if key in summary
        }
        found[name] |= {"losses": losses(name), "said": said.getvalue()}
        found[name]["streams"] = [str(side) for side in sides if side is not None]
        sides.clear()
    Path("own.py").write_text(OWN)
    for folder in ("model", "task"):
        Path("conf", folder).mkdir(parents=True)
    Path("conf/model/lost.yaml").write_text("_target_: own.Lost\n")
    Path("conf/task/threads.yaml").write_text("_target_: own.Threads\n")
    run([*WORDS, "device=acme", "task=threads"], folder="threads")
    found["threads"] = json.loads(Path("threads.json").read_text())
    with contextlib.redirect_stdout(io.StringIO()) as said:
        found["check"] = cli.main([*WORDS, "device=acme", "train.batch_size=16", "train.check=true"])
    run([*WORDS, "device=acme", "train.max_seconds=0.000001"], folder="parts")
    with contextlib.redirect_stdout(io.StringIO()) as said:
        codes = [cli.main(words) for words in (["resume", "parts", "train.max_seconds=null"], ["evaluate", "acme"])]
    found["resumed"] = {"codes": codes, "losses": losses("parts"), "said": said.getvalue()}
    for name, words in {
        "lost": ["device=acme", "model=lost"],
        "half": ["device=acme", "train.precision=bf16"],
        "typo": ["device=acmee"],
        "number": ["device=acme:7"],
    }.items():
        try:
            plain = [word for word in WORDS if name != "lost" or not word.startswith("model")]
            found[name] = run([*plain, *words], folder=name)["error"]
        except RunnerError as error:
            found[name] = str(error)
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main(["devices", "--json"])
    found["devices"] = json.loads(said.getvalue())
    print(json.dumps(found, default=str))


if __name__ == "__main__":
    sys.exit(main())

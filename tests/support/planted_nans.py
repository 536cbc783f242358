"""Runs with a known cause of a loss that is not finite, or of a spike, and the expected output of `explain` for each.

PARTS is a user's my_parts.py: `# HERE: name` marks a cause's line.
"""

from __future__ import annotations

import io
import json
import time
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from runner import cli
from runner.tracking.journal_reader import read_points

BAD = 123  # the row that causes it, if it is a row

PARTS = """
import torch
from torch import nn
from torch.utils.data import Dataset

def rows(num=320, bad=123, value=None, like="none", kind="classes"):
    made = torch.Generator().manual_seed(0)
    inputs = torch.rand(num, 6, generator=made) + 0.1
    targets = (inputs.sum(1) > 3.6).long()
    if value is not None:
        inputs[bad, 2] = float(value)
    if like == "zeros":
        inputs[bad] = 0.0
    if kind == "numbers":
        targets = inputs[:, :1] * 2
    if like == "target":
        targets[bad] = 1000.0
    return inputs, targets

class Rows(Dataset):
    def __init__(self, **how):
        self.rows = rows(**how)
        self.classes = ("few", "many")
        self.num_classes = 2

    def __len__(self):
        return len(self.rows[0])

    def __getitem__(self, index):
        return self.rows[0][index], self.rows[1][index]

class OwnRoot(torch.autograd.Function):
    @staticmethod
    def forward(ctx, inputs):
        ctx.save_for_backward(inputs)
        return inputs.abs().sqrt()

    @staticmethod
    def backward(ctx, grad):
        inputs, = ctx.saved_tensors
        return grad * inputs / inputs.abs()  # HERE: custom function

class Net(nn.Module):
    def __init__(self, inputs, outputs, cause="none"):
        super().__init__()
        self.cause = cause
        self.scale = nn.Parameter(torch.ones(inputs))
        self.inner, self.out = nn.Linear(inputs, 16), nn.Linear(16, outputs)
        self.idle = nn.Parameter(torch.ones(3))

    def forward(self, rows):
        return self.out(self.inner(getattr(self, self.cause)(rows)).relu())

    def none(self, rows):
        return rows

    def log(self, rows):
        return torch.log(rows)  # HERE: log of 0

    def root(self, rows):
        return rows * torch.sqrt((rows * self.scale).square().sum(1, keepdim=True))  # HERE: sqrt at 0

    def masked(self, rows):
        is_padding = rows == 0
        weights = (rows * self.scale).masked_fill(is_padding, float("-inf")).softmax(1)  # HERE: all masked
        return rows * weights

    def own(self, rows):
        return OwnRoot.apply(rows * self.scale)

def idle(model, batch):
    found = nn.functional.cross_entropy(model(batch[0]), batch[1])
    return {"loss": found + 0 * model.idle.sum()}
"""

FILES = {
    "my_parts.py": PARTS,
    "conf/model/planted.yaml": "_target_: my_parts.Net\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\ncause: none\n",
    "conf/data/planted.yaml": "_target_: my_parts.rows\nnum: 320\nbad: 123\nvalue: null\nlike: none\nkind: classes\n",
    "conf/data/dataset.yaml": "_target_: my_parts.Rows\nnum: 320\nbad: 123\nvalue: null\nlike: none\nkind: classes\n",
}
WORDS = ("model=planted", "train.batch_size=16", "train.num_epochs=2", "tracking.enabled=false")


@dataclass(frozen=True)
class Cause:
    """A run's overrides, and the expected report."""

    name: str  # the mark of its line; a line in the runner or torch has none
    words: tuple[str, ...]
    operations: tuple[str, ...]  # any of these
    phase: str
    row: int | None = BAD
    says: str = ""  # a part of the advice


CAUSES = (
    Cause("log of 0", ("model.cause=log", "data.value=0"), ("log",), "forward", says="clamp_min"),
    Cause("sqrt at 0", ("model.cause=root", "data.like=zeros"), ("div",), "backward", says="sqrt(x + 1e-12)"),
    Cause(
        "bad row",
        ("data=dataset", "data.value='nan'", "data.val_fraction=0", "data.test_fraction=0"),
        ("addmm",),
        "forward",
        says="number 2 is nan",
    ),
    Cause(
        "exploding rate",
        ("data.kind=numbers", "task=regression", "optimizer=sgd", "optimizer.lr=1e4"),
        ("addmm", "mm", "mse_loss", "mse_loss_backward"),
        "",
        None,
        "a smaller optimizer.lr than 10000",
    ),
    Cause("all masked", ("model.cause=masked", "data.like=zeros"), ("softmax",), "forward", says="only -inf"),
    Cause("custom function", ("model.cause=own", "data.like=zeros"), ("div",), "backward", says="gradcheck on OwnRoot"),
    Cause(
        "eps of 0",
        ("task=own", "task.function._target_=my_parts.idle", "optimizer=adam", "+optimizer.eps=0"),
        ("fused_adam", "fused_adamw", "addcdiv", "foreach_addcdiv"),
        "optimizer",
        None,
        "optimizer.eps=1e-8",
    ),
)


@dataclass(frozen=True)
class Spike:
    """A healthy run with one row whose loss is far above the others'."""

    name: str
    words: tuple[str, ...]
    place: str = ""  # in the file


REGRESSION = ("data.kind=numbers", "data.like=target", "task=regression", "optimizer.lr=1e-3")
SPIKES = (
    Spike("a target", REGRESSION),
    Spike("accumulated", (*REGRESSION, "train.accumulate_steps=2")),
    Spike(
        "a table",
        ("data=table", "data.path=rows.csv", "data.target=y", "data.scale_targets=false", *REGRESSION[2:]),
        "rows.csv, line 125",
    ),
)


def plant(folder: Path) -> None:
    """Write the user's files."""
    for name, text in FILES.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    lines = [f"{row % 7}.5,{row % 5}.25,{1000 if row == BAD else row % 7 * 2}.5" for row in range(320)]
    (folder / "rows.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")


def words_of(case: Cause | Spike, device: str = "cpu") -> list[str]:
    data = () if any(word.startswith("data=") for word in case.words) else ("data=planted",)
    whole = ("data.val_fraction=0", "data.test_fraction=0") if isinstance(case, Spike) else ()
    return [f"device={device}", *data, *WORDS, *whole, *case.words]


def explained(device: Any, kind: str, index: int, *more: str) -> dict[str, Any]:
    """Write a case's files to the current directory, run it, and return the JSON of `explain --json`, with its `seconds`."""
    case = {"cause": CAUSES, "spike": SPIKES}[kind][index]
    plant(Path.cwd())
    code = cli.main([*words_of(case, str(device)), "hydra.run.dir=run", *more])
    assert code == (kind == "cause"), f"the run ended with {code}"
    asked = ["--step", str(leap())] if kind == "spike" else []
    out, began = io.StringIO(), time.perf_counter()
    with redirect_stdout(out), redirect_stderr(io.StringIO()):
        code = cli.main(["explain", "run", "--json", *asked])
    assert code == 0, out.getvalue()
    return {**json.loads(out.getvalue()), "seconds": time.perf_counter() - began}


def leap() -> int:
    """Return the step with the largest increase of the loss."""
    losses = dict(read_points(Path("run"))["train/loss"])
    return max(losses, key=lambda step: losses[step] - losses.get(step - 1, losses[step]))


def line_of(name: str) -> str:
    """Return `my_parts.py:57`, or "" for a cause without a line in the user's files."""
    marked = [number for number, line in enumerate(PARTS.splitlines(), 1) if line.endswith(f"# HERE: {name}")]
    return f"my_parts.py:{marked[0]}" if marked else ""


def wrong_of_cause(cause: Cause, found: dict[str, Any]) -> list[str]:
    """Return the differences between the output of `explain --json` and the expected one."""
    one, rows = found["operation"] or {}, [row["in_data"] for row in found["rows"]]
    checks = {
        f"operation {one.get('name')}": one.get("name") in cause.operations,
        f"phase {one.get('phase')}": not cause.phase or one.get("phase") == cause.phase,
        f"line {one.get('line')}": not line_of(cause.name) or one.get("line") == line_of(cause.name),
        f"rows {rows}": rows == ([] if cause.row is None else [cause.row]),
        f"try {found['try']}": cause.says in found["try"],
        f"replay {found['replay']}": found["replay"]["first_difference"] is None and found["replay"]["compared"] > 0,
    }
    return [words for words, is_right in checks.items() if not is_right]


def wrong_of_spike(spike: Spike, found: dict[str, Any]) -> list[str]:
    rows = found["rows"]
    first = rows[0] if rows else {}
    checks = {
        "not finite": found["is_finite"],
        f"row {first.get('in_data')}": first.get("in_data") == BAD,
        f"place {first.get('place')}": first.get("place") == spike.place,
        f"norms {found['gradient_norms']}": len(found["gradient_norms"]) >= 2,
        f"replay {found['replay']}": found["replay"]["first_difference"] is None,
    }
    return [words for words, is_right in checks.items() if not is_right]

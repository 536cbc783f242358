"""`explain` names known causes and spikes for any position of the checkpoint, and reports what it can't explain."""

import json
import shutil
import sys
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from runner import cli
from runner.inspection.operations import observe
from runner.inspection.tensor_names import TensorNames
from runner.tools.explain.explain import explain as explain_run
from runner.tools.explain.not_finite import NotFiniteObserver
from runner.tools.explain.text import Case, advice
from runner.tools.explain.text import _domain as of_its_domain
from runner.tracking.journal_reader import read_points
from runner.training.checkpoint import load

BAD = 123  # the row that causes it, if it is a row

#: a user's module; `# HERE: name` marks a cause's line
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

CONF = {
    "model/planted": "_target_: my_parts.Net\ninputs: ${facts.in_features}\noutputs: ${facts.out_features}\ncause: none\n",
    "data/planted": "_target_: my_parts.rows\nnum: 320\nbad: 123\nvalue: null\nlike: none\nkind: classes\n",
    "data/dataset": "_target_: my_parts.Rows\nnum: 320\nbad: 123\nvalue: null\nlike: none\nkind: classes\n",
}


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


REGRESSION = ("data.kind=numbers", "data.like=target", "task=regression", "optimizer.lr=1e-3")
#: healthy runs with one row whose loss is far above the others': overrides, and the row's place in the file
SPIKES = {
    "a target": (REGRESSION, ""),
    "accumulated": ((*REGRESSION, "train.accumulate_steps=2"), ""),
    "a table": (
        ("data=table", "data.path=rows.csv", "data.target=y", "data.scale_targets=false", *REGRESSION[2:]),
        "rows.csv, line 125",
    ),
}


def words_of(words):
    data = [] if any(word.startswith("data=") for word in words) else ["data=planted"]
    small = ["train.batch_size=16", "train.num_epochs=2", "tracking.enabled=false", "hydra.run.dir=run", "device=cpu"]
    return [*data, "model=planted", *small, *words]


LOG = words_of(CAUSES[0].words)
SPIKE = words_of([*REGRESSION, "data.val_fraction=0", "data.test_fraction=0"])


@pytest.fixture
def here(own_folder):
    """A user's directory with the parts."""
    (own_folder / "my_parts.py").write_text(PARTS)
    for name, text in CONF.items():
        (own_folder / f"conf/{name}.yaml").parent.mkdir(parents=True, exist_ok=True)
        (own_folder / f"conf/{name}.yaml").write_text(text)
    return own_folder


def explain(capsys, *words):
    capsys.readouterr()
    code = cli.main(["explain", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def leap():
    """Return the step with the largest increase of the loss."""
    losses = dict(read_points(Path("run"))["train/loss"])
    return max(losses, key=lambda step: losses[step] - losses.get(step - 1, losses[step]))


def line_of(name):
    """Return `my_parts.py:57`, or "" for a cause without a line in the user's files."""
    marked = [number for number, line in enumerate(PARTS.splitlines(), 1) if line.endswith(f"# HERE: {name}")]
    return f"my_parts.py:{marked[0]}" if marked else ""


def rewrite(old, new):
    """Change the user's code between the run and `explain`."""
    text = Path("my_parts.py").read_text()
    assert old in text
    Path("my_parts.py").write_text(text.replace(old, new))
    shutil.rmtree("__pycache__", ignore_errors=True)  # Python compares a file's size and second, which may be equal
    del sys.modules["my_parts"]


@pytest.mark.parametrize("cause", CAUSES, ids=lambda cause: cause.name)
def test_planted_cause_is_named_with_line(cause, here, capsys):
    assert cli.main(words_of(cause.words)) == 1
    code, found, _ = explain(capsys, "run")
    operation = found["operation"]
    assert code == 0
    assert operation["name"] in cause.operations
    assert operation["phase"] == cause.phase or not cause.phase
    assert operation["line"] == line_of(cause.name) or not line_of(cause.name)
    assert [row["in_data"] for row in found["rows"]] == ([] if cause.row is None else [cause.row])
    assert cause.says in found["try"]
    assert found["replay"]["first_difference"] is None and found["replay"]["compared"] > 0


@pytest.mark.parametrize(("words", "place"), SPIKES.values(), ids=SPIKES)
def test_spike_is_explained_by_rows(words, place, here, capsys):
    lines = [f"{row % 7}.5,{row % 5}.25,{1000 if row == BAD else row % 7 * 2}.5" for row in range(320)]
    Path("rows.csv").write_text("\n".join(["a,b,y", *lines]) + "\n")
    assert cli.main(words_of([*words, "data.val_fraction=0", "data.test_fraction=0"])) == 0
    code, found, _ = explain(capsys, "run", "--step", str(leap()))
    assert (code, found["is_finite"], found["replay"]["first_difference"]) == (0, True, None)
    assert (found["rows"][0]["in_data"], found["rows"][0]["place"]) == (BAD, place)
    assert len(found["gradient_norms"]) >= 2


def test_failed_run_suggests_explain_folder_unchanged(here, capsys):
    assert cli.main([*LOG]) == 1
    assert "explain  python -m runner explain run\n" in capsys.readouterr().out
    before = {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")}
    assert cli.main(["explain", "run"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "run     run: train/loss is nan at step 8"
    assert lines[1] == "replay  from the beginning, 7 steps: losses bitwise identical"
    assert lines[2] == f"first   log gives inf (1 of 96): {line_of('log of 0')} in Net, in the forward pass"
    assert "row 0 of batch 7, row 123 of the data" in lines[6]
    assert {path: path.stat().st_mtime_ns for path in Path("run").rglob("*")} == before


def test_explain_resumed_run_uses_earlier_checkpoint(here, capsys):
    words = [*LOG, "train.checkpoint_every_steps=3", "scheduler=cosine", "train.ema_decay=0.9"]
    assert cli.main([*words, "train.num_steps=5"]) == 0
    assert cli.main(["resume", "run", "train.num_steps=9"]) == 1
    code, found, _ = explain(capsys, "run")
    replay = found["replay"]
    assert (code, replay["from_step"], replay["steps"], replay["compared"]) == (0, 6, 1, 2)
    assert replay["first_difference"] is None
    assert [row["in_data"] for row in found["rows"]] == [123]


def test_checkpoints_with_nonfinite_weights_are_skipped(here, capsys):
    """The weights are NaN from step 8 on, and so are the checkpoints after it."""
    words = words_of(next(cause for cause in CAUSES if cause.name == "sqrt at 0").words)
    assert cli.main([*words, "train.checkpoint_every_steps=8", "train.num_steps=8"]) == 0
    assert cli.main(["resume", "run", "train.num_steps=9"]) == 1
    code, found, err = explain(capsys, "run")
    assert (code, found["asked_step"], found["step"], found["replay"]["from_step"]) == (0, 9, 8, 0)
    assert "step    8: it made the weights non-finite, and the loss of step 9 shows it" in err
    assert found["operation"]["line"] == line_of("sqrt at 0")
    assert [row["in_data"] for row in found["rows"]] == [123], "by the weights of before the step"


def test_no_checkpoint_is_after_nonfinite_loss(here, capsys):
    kept = ["train.checkpoint_every_steps=1", "train.evaluate_every_steps=7", "train.keep_checkpoints=every_epoch"]
    best = "train.early_stopping={metric:val/accuracy,mode:min}"  # broken weights would be the best
    assert cli.main([*LOG, *kept, best]) == 1
    found = json.loads(Path("run/summary.json").read_text())
    assert "train/loss is nan at step 8" in found["error"] and found["best"]["step"] == 7
    written = {file.stem: load(file)["step"] for file in Path("run/checkpoints").glob("*.pt")}
    written.pop("last-before", None)
    assert written == {"step-7": 7, "best": 7, "last": 7}
    assert explain(capsys, "run")[1]["replay"]["from_step"] == 7
    assert cli.main(["resume", "run"]) == 1
    assert json.loads(Path("run/summary.json").read_text())["error"] == found["error"]


def test_explain_accumulated_steps_and_mean_points(here, capsys):
    words = ["train.accumulate_steps=2", "metrics.every=3", "train.clip_grad_norm=1", "data.residency=stream"]
    assert cli.main([*LOG, *words]) == 1
    code, found, _ = explain(capsys, "run")
    assert (code, found["asked_step"], found["step"], found["num_rows"]) == (0, 6, 4, 32)
    assert [(row["batch"], row["row"], row["in_data"]) for row in found["rows"]] == [(7, 0, 123)]


def test_explain_own_loader_names_batch_rows(here, capsys):
    (here / "my_loader.py").write_text(
        "import my_parts\nfrom torch.utils.data import DataLoader\n"
        "def loader():\n    return DataLoader(my_parts.Rows(value=0), batch_size=16)\n"
    )
    (here / "conf/data/own.yaml").write_text("_target_: my_loader.loader\n")
    words = [word for word in LOG if not word.startswith("data")]
    words += ["data=own", "data.val_fraction=0", "data.test_fraction=0"]
    assert cli.main(words) == 1
    code, found, _ = explain(capsys, "run")
    assert code == 0
    assert [(row["batch"], row["row"], row["in_data"]) for row in found["rows"]] == [(7, 11, None)]


def test_unexplainable_run_gives_help(here, capsys):
    assert cli.main([*SPIKE, "train.num_epochs=1"]) == 0
    for words, so, write in (
        (("run",), "all 20 losses are finite", f"explain run --step {leap()}"),
        (("run", "--step", "21"), "the run took 20 steps", "--step 20"),
        (("run", "--step", "0"), "`--step` must be a whole number, 1 or more", "--step 1"),
        (("run", "seed=2"), "`explain` takes the run as it was", "explain --help"),
        (("nowhere",), "there is no directory `nowhere`", "the run's last lines"),
    ):
        code, found, _ = explain(capsys, *words)
        assert code == 2
        assert so in found["faults"][0]["so"]
        assert write in found["faults"][0]["write"]


def test_a_replay_that_stays_finite_says_so(here, capsys):
    assert cli.main([*LOG]) == 1
    rewrite("torch.log(rows)", "torch.log1p(rows)")
    code, found, _ = explain(capsys, "run")
    assert code == 2
    assert "the replay stays finite" in found["faults"][0]["so"]


def test_notes_say_why_the_bits_may_differ(here):
    """A run with CUDA graphs is replayed without them, also on a device that does not support them."""
    assert cli.main([*LOG]) == 1
    summary = json.loads(Path("run/summary.json").read_text())
    summary |= {"num_processes": 2, "device": "cuda:3", "versions": {"torch": "2.0"}}
    Path("run/summary.json").write_text(json.dumps(summary))
    rewrite("+ 0.1", "+ 0.2")
    found = explain_run("run", ["train.cuda_graph=true"], step=None)
    assert [note.partition(",")[0] for note in found["notes"]] == [
        "2 processes trained it",
        "its steps were compiled",
        "it ran on cuda:3",
        "it ran with torch 2.0",
        "the data changed since the run trained: its fingerprint differs",
    ]
    assert found["replay"]["first_difference"][0] == 1


@pytest.mark.parametrize(
    ("name", "least", "said"),
    [
        ("log", 0.0, "x.clamp_min(1e-8) before log (of 0 here)"),
        ("log10", -2.5, "x.clamp_min(1e-8) before log10 (of -2.5 here)"),
        ("log1p", -1.0, "x.clamp_min(-1 + 1e-6) before log1p (of -1 here)"),
    ],
)
def test_suggestion_keeps_set_values(name, least, said):
    given = SimpleNamespace(range=SimpleNamespace(least=least, size=abs(least)))
    origin = SimpleNamespace(name=name, inputs=[given], phase="forward")
    assert of_its_domain(SimpleNamespace(origin=origin)).startswith(said)


@pytest.mark.parametrize(
    ("op", "values", "said"),
    [
        (lambda x: x**2, [-9.12e24, 1.0], "it is taken of 9.12e+24, and float32 ends at 3.4e+38"),
        (lambda x: x**0.5, [-2.0, 1.0], "a fraction's power of -2 is none"),
        (lambda x: x**0.5, [-2.0, torch.inf], ""),
        (lambda x: x**-1.5, [0.0, 1000.0], ""),
        (torch.log, [1.0, torch.inf], ""),
        (torch.log1p, [-0.5, torch.inf], ""),
        (torch.log, [-1.0, 1.0], "x.clamp_min(1e-8) before log (of -1 here)"),
    ],
)
def test_suggestion_for_operation_fits_its_inputs(op, values, said):
    given = torch.tensor(values)
    observer = NotFiniteObserver(torch.nn.Identity(), TensorNames())
    with observe(observer):
        result = op(given)
    found = advice(Case(observer.cause_of(result), [], [], []))
    assert said in found and bool(said) == bool(found)


def test_builtin_models_operation_is_named_by_line(own_folder, capsys):
    words = ["model=mlp", "optimizer=sgd", "optimizer.lr=1e25", "train.num_steps=4", "tracking.enabled=false"]
    assert cli.main([*words, "device=cpu", "hydra.run.dir=run"]) == 1
    found = explain(capsys, "run")[1]
    assert found["operation"]["line"].startswith("mlp.py:")

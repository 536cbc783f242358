"""`explain` names known causes and spikes for any position of the checkpoint, and reports what it can't explain."""

import json
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from planted_nans import CAUSES, SPIKES, explained, leap, line_of, plant, words_of, wrong_of_cause, wrong_of_spike

from runner import cli
from runner.inspection.operations import observe
from runner.inspection.tensor_names import TensorNames
from runner.tools.explain.explain import explain as explain_run
from runner.tools.explain.not_finite import NotFiniteObserver
from runner.tools.explain.text import Case, advice
from runner.tools.explain.text import _domain as of_its_domain
from runner.training.checkpoint import load

LOG = words_of(CAUSES[0])


@pytest.fixture
def here(own_folder):
    plant(own_folder)
    return own_folder


def explain(capsys, *words):
    capsys.readouterr()
    code = cli.main(["explain", *words, "--json"])
    out, err = capsys.readouterr()
    return code, json.loads(out), err


def rewrite(old, new):
    """Change the user's code between the run and `explain`."""
    text = Path("my_parts.py").read_text()
    assert old in text
    Path("my_parts.py").write_text(text.replace(old, new))
    shutil.rmtree("__pycache__", ignore_errors=True)  # Python compares a file's size and second, which may be equal
    del sys.modules["my_parts"]


@pytest.mark.parametrize("index", range(len(CAUSES)), ids=lambda index: CAUSES[index].name)
def test_planted_cause_is_named_with_line(here, index):
    assert wrong_of_cause(CAUSES[index], explained("cpu", "cause", index)) == []


@pytest.mark.parametrize("index", range(len(SPIKES)), ids=lambda index: SPIKES[index].name)
def test_spike_is_explained_by_rows(here, index):
    assert wrong_of_spike(SPIKES[index], explained("cpu", "spike", index)) == []


def test_failed_run_suggests_explain_folder_unchanged(here, capsys):
    assert cli.main([*LOG, "hydra.run.dir=run"]) == 1
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
    words = [*LOG, "hydra.run.dir=run", "train.checkpoint_every_steps=3", "scheduler=cosine", "train.ema_decay=0.9"]
    assert cli.main([*words, "train.num_steps=5"]) == 0
    assert cli.main(["resume", "run", "train.num_steps=9"]) == 1
    code, found, _ = explain(capsys, "run")
    replay = found["replay"]
    assert (code, replay["from_step"], replay["steps"], replay["compared"]) == (0, 6, 1, 2)
    assert replay["first_difference"] is None
    assert [row["in_data"] for row in found["rows"]] == [123]


def test_checkpoints_with_nonfinite_weights_are_skipped(here, capsys):
    """The weights are NaN from step 8 on, and so are the checkpoints after it."""
    words = words_of(next(cause for cause in CAUSES if cause.name == "sqrt at 0"))
    assert cli.main([*words, "hydra.run.dir=run", "train.checkpoint_every_steps=8", "train.num_steps=8"]) == 0
    assert cli.main(["resume", "run", "train.num_steps=9"]) == 1
    code, found, err = explain(capsys, "run")
    assert (code, found["asked_step"], found["step"], found["replay"]["from_step"]) == (0, 9, 8, 0)
    assert "step    8: it made the weights non-finite, and the loss of step 9 shows it" in err
    assert found["operation"]["line"] == line_of("sqrt at 0")
    assert [row["in_data"] for row in found["rows"]] == [123], "by the weights of before the step"


def test_no_checkpoint_is_after_nonfinite_loss(here, capsys):
    kept = ["train.checkpoint_every_steps=1", "train.evaluate_every_steps=7", "train.keep_checkpoints=every_epoch"]
    best = "train.early_stopping={metric:val/accuracy,mode:min}"  # broken weights would be the best
    assert cli.main([*LOG, *kept, best, "hydra.run.dir=run"]) == 1
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
    assert cli.main([*LOG, *words, "hydra.run.dir=run"]) == 1
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
    words += ["data=own", "data.val_fraction=0", "data.test_fraction=0", "hydra.run.dir=run"]
    assert cli.main(words) == 1
    code, found, _ = explain(capsys, "run")
    assert code == 0
    assert [(row["batch"], row["row"], row["in_data"]) for row in found["rows"]] == [(7, 11, None)]


def test_unexplainable_run_gives_help(here, capsys):
    assert cli.main([*words_of(SPIKES[0]), "hydra.run.dir=run", "train.num_epochs=1"]) == 0
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
    assert cli.main([*LOG, "hydra.run.dir=run"]) == 1
    rewrite("torch.log(rows)", "torch.log1p(rows)")
    code, found, _ = explain(capsys, "run")
    assert code == 2
    assert "the replay stays finite" in found["faults"][0]["so"]


def test_notes_say_why_the_bits_may_differ(here):
    """A run with CUDA graphs is replayed without them, also on a device that does not support them."""
    assert cli.main([*LOG, "hydra.run.dir=run"]) == 1
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

"""`train.check=true`: its output and files, and an error in each part that it finds."""

import json
import re
from pathlib import Path

import pytest

from runner import cli, run
from runner.errors import RunnerError

PARTS = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Sequential):
    def __init__(self, inputs=2, outputs=2):
        super().__init__(nn.Flatten(), nn.Linear(inputs, 8), nn.ReLU(), nn.Linear(8, outputs))

class Branching(Net):
    def forward(self, inputs):  # which no graph has
        return super().forward(inputs if float(inputs.sum()) > 0 else -inputs)

class NoPickle(Branching):
    def __init__(self):
        super().__init__()
        self.key = lambda rows: rows

class Another(Net):  # each is of another size than the one before
    made = 0

    def __init__(self):
        super().__init__()
        Another.made += 1
        self.own = nn.Parameter(torch.zeros(Another.made))

    def forward(self, inputs):
        return super().forward(inputs) + self.own.sum()

class Forgets(Net):
    def load_state_dict(self, state, *args, **kwargs):
        return super().load_state_dict({name: value * 0 for name, value in state.items()}, *args, **kwargs)

class Fresh(Net):
    def forward(self, inputs):
        return nn.Linear(2, 2)(super().forward(inputs))

class Fixed(Net):
    def __init__(self, least=1):
        super().__init__()
        self.least = least

    def forward(self, inputs):
        if len(inputs) < self.least:
            raise ValueError(f"no {len(inputs)} rows")
        return super().forward(inputs)

def at_validation(model, batch):
    if not model.training and len(batch[0]) != 7:
        raise ValueError("no validation")
    return F.cross_entropy(model(batch[0]), batch[1])

def fails(predictions, targets):
    raise ValueError("no metric")

class OnSecondUse:
    calls = 0

    def update(self, predictions, targets):
        OnSecondUse.calls += 1
        if OnSecondUse.calls == 2:
            raise ValueError("no test")

    def compute(self):
        return torch.tensor(1.0)

    def reset(self):
        pass

def hook(view):
    if view.when == "end":
        raise ValueError("no hook")
    return {"norm": 1.0}

def good_hook(view):
    return {"norm": view.model[1].weight.norm()}
"""
WORDS = ["train.check=true", "data=playground", "data.num_rows=700", "data.test_fraction=0.2", "task.plots=[confusion]"]
NET = [*WORDS, "model=mlp", "model.hidden_sizes=[8]", "train.batch_size=32"]


@pytest.fixture
def here(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    (own_folder / "my_parts.py").write_text(PARTS)
    for name in ("Net", "Branching", "NoPickle", "Another", "Forgets", "Fresh", "Fixed"):
        file = own_folder / "conf" / "model" / f"{name.lower()}.yaml"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"_target_: my_parts.{name}\n")
    return own_folder


def left(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts)


def test_check_reports_parts_and_leaves_nothing(here, capsys):
    before = left(here)
    assert cli.main([*WORDS, "model=net", "train.hooks=[my_parts.good_hook]"]) == 0
    lines = capsys.readouterr().out.splitlines()
    recorded = [re.split(r"[:(]| of [0-9]", line[8:])[0].strip() for line in lines if line.startswith("check:  ")]
    assert recorded == [
        *("data, model, optimizer", "the last batch of train", "2 optimizer steps", "a batch of val"),
        *("a batch of test", "hooks", "checkpoint", "plots", "model"),
        *("export as safetensors", "export as pt2"),
    ]
    assert any("2 optimizer steps" in line and "all 40 take" in line for line in lines) and lines[-1].startswith(
        "check: everything works ("
    )
    assert not any(line.startswith(("run", "resume", "rerun", "mlflow")) for line in lines)
    assert left(here) == before


def test_check_does_not_change_last(here, capsys):
    words = [word for word in NET if word != "train.check=true"]
    assert cli.main([*words, "train.num_steps=1", "tracking.enabled=false"]) == 0
    (folder,) = Path("outputs").glob("*/*")
    before = left(here)
    capsys.readouterr()
    assert cli.main([*NET, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["folder"] is None and found["num_steps"] == 2 and found["status"] == "finished"
    assert cli.main(["resume", "last", "train.num_steps=2", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["folder"] == str(folder.absolute())
    assert len(left(here)) >= len(before) and [*Path("outputs").glob("*/*")] == [folder]


@pytest.mark.parametrize(
    ("more", "code", "output"),
    [
        (["model=net", "task=own", "task.function._target_=my_parts.at_validation"], 1, "ValueError: no validation"),
        (["model=net", "task.metrics={own:{_target_:my_parts.OnSecondUse}}"], 1, "ValueError: no test"),
        (["model=net", "train.hooks=[{_target_: my_parts.hook, at: [epoch, end]}]"], 1, "ValueError: no hook"),
        (["model=another"], 2, "the weights don't belong to the model"),
        (["model=forgets"], 2, "differs from the checkpoint's after loading"),
        (["model=fresh"], 2, "two passes over one batch differ by up to"),
        (["model=fixed", "+model.least=107"], 1, "ValueError: no 106 rows"),
        (["model=nopickle"], 2, "can't be exported as a graph or pickled"),
        (["model=net", "optimizer.lr=1e30"], 1, "train/loss is"),
    ],
)
def test_check_reports_problem_of_each_part(here, capsys, more, code, output):
    words = [word for word in WORDS if not (word.startswith("task.plots") and "task=own" in more)]
    before = left(here)
    assert cli.main([*words, *more, "tracking.enabled=false"]) == code
    out, err = capsys.readouterr()
    assert output in " ".join((out + err).split()) and "everything works" not in out
    assert left(here) == before
    if output.startswith("ValueError"):
        log = Path(out.splitlines()[-1].removeprefix("log").strip())
        assert "Traceback" in log.read_text()
        log.unlink()


def test_check_exports_branching_model_as_pickle(here, capsys):
    assert cli.main([*WORDS, "model=branching", "tracking.enabled=false"]) == 0
    assert "export as pickle of" in capsys.readouterr().out


def test_check_with_failing_plot_fails(here, capsys, monkeypatch):
    monkeypatch.setattr("runner.experiment.plots.draw.draw_confusion", lambda results: 1 / 0)
    assert cli.main([*NET, "tracking.enabled=false"]) == 1
    assert "✗ failed   plots: confusion.png left out: ZeroDivisionError" in capsys.readouterr().out


def test_check_of_a_kept_run_is_refused(here, warm_jobs, capsys):
    run_words = [word for word in NET if word != "train.check=true"]
    assert cli.main([*run_words, "train.num_steps=1", "tracking.enabled=false", "hydra.run.dir=FOLDER"]) == 0
    before = left(here)
    for words, source in (
        (["-m", *NET, "seed=1,2"], "train.check=true in a sweep"),
        (["resume", "FOLDER", "train.check=true"], "resume FOLDER train.check=true"),
        (["reproduce", "FOLDER", "train.check=true", "--trust"], "reproduce train.check=true"),
    ):
        assert cli.main(words) == 2
        assert f"--> {source}" in capsys.readouterr().err
        assert left(here) == before


def test_check_in_a_notebook_raises(here):
    with pytest.raises(RunnerError, match=r"run\(\) train\.check=true"):
        run(NET)


def test_check_keeps_traceback_of_early_error(here, capsys):
    (here / "my_data.py").write_text("def rows():\n    raise KeyError('no rows')\n")
    (here / "conf" / "data").mkdir()
    (here / "conf" / "data" / "mine.yaml").write_text("_target_: my_data.rows\n")
    assert cli.main(["train.check=true", "data=mine", "model=mlp", "tracking.enabled=false"]) != 0
    assert "no rows" in capsys.readouterr().err and not [*here.glob(".runner-check-*")]


@pytest.mark.slow
def test_check_of_two_processes_passes(here, warm):
    words = "data=iris model=mlp task.metrics=[f1] train.eval_batch_size=2 scheduler=plateau train.ema_decay=0.9 "
    words += "data.num_workers=1 train.keep_checkpoints=best:1 train.check=true train.num_processes=2 device=cpu"
    with warm.command(here, *words.split(), "tracking.enabled=false") as command:
        output, _ = command.communicate()
    assert command.returncode == 0 and "check: everything works (" in output, output
    assert not [*here.glob(".runner-check-*")]

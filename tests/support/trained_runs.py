"""Real runs, created once for all tests that name a run: their directory, and a command line in it."""

import contextlib
import io
import os
import sys
from pathlib import Path

import pytest

from runner import cli
from runner.config.instantiate import build
from runner.models.card import read_card
from runner.training import checkpoint

QUIET = "tracking.enabled=false"
NO_PICTURES = "task.plots=false"
SMALL = ["model=mlp", "model.hidden_sizes=[8]", "device=cpu", "train.num_epochs=2", "train.batch_size=32"]

#: a user's data: a table with classes as text, normalized by a layer of the model, read again by its reader
MY_ROWS = """
import csv
import torch
from torch import nn
from runner.data.source import Preprocessing, Source, facts_of
from runner.errors import Problem, RunnerError


class Scale(nn.Module):
    def __init__(self, means, spreads):
        super().__init__()
        self.register_buffer("means", torch.tensor(means))
        self.register_buffer("spreads", torch.tensor(spreads))

    def forward(self, rows):
        return torch.nan_to_num((rows - self.means) / self.spreads)  # a cell without a value is an average one


class Back(nn.Module):
    def __init__(self, spread):
        super().__init__()
        self.spread = spread

    def forward(self, numbers):
        return numbers * self.spread


def lines(path):
    with open(path, newline="") as stream:
        return list(csv.DictReader(stream))


def numbers(rows, columns, path):
    for column in columns:
        if rows and column not in rows[0]:
            raise RunnerError(Problem(f"--input {path}", f"it has no column {column}", f"a table with {column}"))
    return torch.tensor([[float(row[column] or "nan") for column in columns] for row in rows])


def read(path, columns, several=0):
    rows = numbers(lines(path), columns, path)
    return rows if not several else (part for part in rows.split(several))


def table(path, target="kind", several=0, like=None):
    rows = lines(path)
    columns = like["columns"] if like else [name for name in rows[0] if name not in ("kind", "size", target)]
    inputs = numbers(rows, columns, path)
    if target == "kind":
        classes = tuple(dict.fromkeys(row[target] for row in rows))  # in the order of the file
        targets = torch.tensor([classes.index(row[target]) for row in rows])
    else:
        classes, targets = (), torch.tensor([[float(row[target])] for row in rows])

    def around(train):
        known = train[0]
        before = {"_target_": "my_rows.Scale", "means": known.mean(0).tolist(), "spreads": known.std(0).tolist()}
        return Preprocessing(before, None if classes else {"_target_": "my_rows.Back", "spread": float(train[1].std())})

    return Source(
        "table", (inputs, targets), facts_of(inputs, targets, num_classes=len(classes) or None),
        labels=targets if classes else None, classes=classes, targets=() if classes else (target,), around=around,
        reader={"_target_": "my_rows.read", "_partial_": True, "columns": columns, "several": several},
    )


def difference(model, batch):
    inputs, targets = batch
    return {"loss": (model(inputs).mean(1) - targets.float()).abs().mean()}
"""


#: a user's models, which need only torch
MY_NETS = '''
import torch
from torch import nn


class Branching(nn.Module):
    def __init__(self, in_features, out_features):
        super().__init__()
        self.map = nn.Linear(in_features, out_features)

    def forward(self, rows):
        outputs = self.map(rows.flatten(1))
        return outputs * 2 if outputs.sum() > 0 else outputs


class Solving(Branching):
    def forward(self, rows):
        outputs = self.map(rows.flatten(1))
        return outputs + torch.linalg.lstsq(outputs, outputs).solution.sum()


class OverTheBatch(Branching):
    """Each answer depends on the number of rows, as Python counts them: an export keeps that number."""

    def forward(self, rows):
        return self.map(rows.flatten(1)) * float(torch.empty(rows.shape[0]).numel())
'''


def write_table(path, count, *, start=0, order=1):
    """Write rows of three numbers: a is far from 0, and the kind depends on b; the header is quoted."""
    rows = ['a,"the b, in m",c,kind,size']
    for number in list(range(start, start + count))[::order]:
        b = (number * 7 % 20) / 10 - 1
        rows.append(f"{1000 + number % 5},{b},{number % 3},{'high' if b > 0 else 'low'},{50 * b}")
    path.write_text("\n".join(rows) + "\n")


def model_of(folder):
    """Return the module with the run's best weights, built without runner.runs."""
    model = build(read_card(Path(folder)).model, key="model")
    model.load_state_dict(checkpoint.load(Path(folder) / "checkpoints/best.pt")["model"])
    return model.eval()


@contextlib.contextmanager
def inside(folder):
    before, path = Path.cwd(), list(sys.path)
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path[:] = path


@pytest.fixture(scope="session")
def home(tmp_path_factory):
    """outputs/digits/run, outputs/table/run (classes), outputs/sizes/run (a regression), outputs/raw/run (a custom task)."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "my_rows.py").write_text(MY_ROWS)
    (folder / "my_nets.py").write_text(MY_NETS)
    write_table(folder / "train.csv", 200)
    (folder / "conf" / "data").mkdir(parents=True)
    (folder / "conf" / "data" / "mine.yaml").write_text("_target_: my_rows.table\npath: train.csv\n")
    runs = {
        "digits": f"data.limit=300 {NO_PICTURES}",
        "table": f"data=mine {NO_PICTURES} train.num_epochs=15 optimizer.lr=0.03",
        "sizes": f"data=mine {NO_PICTURES} +data.target=size +data.several=7 task=regression optimizer.lr=0.01",
        "raw": "data.limit=300 task=own task.function._target_=my_rows.difference",
    }
    with inside(folder):
        for name, words in runs.items():
            path = f"hydra.run.dir=outputs/{name}/run"
            with contextlib.redirect_stdout(io.StringIO()):
                assert cli.main([*SMALL, QUIET, path, *words.split()]) == 0, name
    yield folder
    for name in ("my_rows", "my_nets"):
        sys.modules.pop(name, None)


@pytest.fixture
def at_home(home):
    """The runs' directory as the current one; a test's files there are removed, as an error may suggest them."""
    before = set(home.iterdir())
    with inside(home):
        yield home
    for file in set(home.iterdir()) - before:
        if file.is_file():
            file.unlink()


@pytest.fixture
def run(capfd):
    """Return a function that runs a command line, and returns its exit code and the output of both streams."""

    def call(*words):
        capfd.readouterr()
        code = cli.main(list(words))
        said = capfd.readouterr()
        assert "Traceback" not in said.out + said.err
        return code, said.out, said.err

    return call


@pytest.fixture
def table():
    """Return the function that writes a table like the runs' training data."""
    return write_table

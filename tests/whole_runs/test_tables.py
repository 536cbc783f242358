"""Whole runs on a user's table: trained, stored, and applied to the raw file again, as prediction does."""

import json
import random
from pathlib import Path

import numpy as np
import pytest
import torch

import runner
from runner.config.instantiate import build
from runner.data.split import split
from runner.data.tables.table import table
from runner.models.card import read_card

SMALL = (
    "data=table",
    "data.path=people.csv",
    "model=mlp",
    "model.hidden_sizes=[16]",
    "train.num_epochs=60",
    "train.batch_size=32",
    "optimizer.lr=0.01",
    "device=cpu",
    "tracking.enabled=false",
    "task.plots=false",
)


@pytest.fixture
def people(own_folder):
    """Write a table with texts, dates, booleans, missing values, and a column of names that holds no information."""
    draw = random.Random(0)
    lines = ["name,age,city,member,joined,points,wage,group"]
    for index in range(400):
        age, city, member = draw.randint(18, 80), draw.choice(["Oslo", "Rome", "Lyon"]), draw.random() < 0.5
        joined = f"{draw.randint(2015, 2025)}-{draw.randint(1, 12):02d}-{draw.randint(1, 28):02d}"
        points = draw.gauss(0, 100)
        wage = 30_000 + 400 * age + 5_000 * (city == "Oslo") + 3_000 * member + draw.gauss(0, 500)
        group = "senior" if age + 20 * (city == "Rome") > 60 else "junior"
        cells = [age, city, member, joined, f"{points:.2f}"]
        cells = ["" if place != 0 and draw.random() < 0.05 else cell for place, cell in enumerate(cells)]
        lines.append(f"person {index}," + ",".join(map(str, cells)) + f",{wage:.0f},{group}")
    (own_folder / "people.csv").write_text("\n".join(lines) + "\n")
    return own_folder


def asked_again(folder, path):
    """Apply the stored model to the raw file: everything is from the run directory, without the data's code."""
    card = read_card(folder)
    model = build(card.model, key="model").eval()
    state = torch.load(folder / "checkpoints" / "best.pt", weights_only=True)
    model.load_state_dict(state["model"])
    with torch.no_grad():
        return card, model(build(card.reader, key="reader")(path))


def test_classes(people):
    found = runner.run([*SMALL, "data.drop=[wage]", "train.early_stopping.metric=val/accuracy"], folder="run")
    assert found["status"] == "finished"
    assert found["host_reads"]["unexpected"] == 0
    assert found["metrics"]["test/accuracy"] > 0.85
    card, outputs = asked_again(people / "run", "people.csv")
    assert card.classes == ("junior", "senior")
    source = table("people.csv", drop=["wage"])
    best = torch.tensor(
        [card.classes.index(line.rsplit(",", 1)[1]) for line in (people / "people.csv").read_text().split("\n")[1:-1]]
    )
    assert torch.equal(best, source.rows[1])
    indices = (torch.arange(400), source.rows[1])
    chosen = split(_with(source, indices), val_fraction=0.1, test_fraction=0.1, limit=None, seed=0).val[0]
    accuracy = (outputs[chosen].argmax(1) == best[chosen]).float().mean().item()
    assert accuracy == pytest.approx(found["best"]["value"], abs=1e-6)


def test_numbers(people):
    words = ["data.target=wage", "data.drop=[group]", "task=regression"]
    found = runner.run([*SMALL, *words], folder="run")
    assert found["metrics"]["test/mae"] < 2_000  # in the target's units: a mean of 50,000, a spread of 8,000
    card, outputs = asked_again(people / "run", "people.csv")
    assert (card.targets, card.classes) == (("wage",), ())
    wages = torch.tensor(
        [[float(line.split(",")[-2])] for line in (people / "people.csv").read_text().split("\n")[1:-1]]
    )
    source = table("people.csv", "wage", drop=["group"])
    chosen = split(
        _with(source, (torch.arange(400), wages)), val_fraction=0.1, test_fraction=0.1, limit=None, seed=0
    ).val[0]
    loss = ((outputs[chosen] - wages[chosen]) ** 2).mean().item()
    assert loss == pytest.approx(found["best"]["value"], rel=1e-5)


def test_rows_on_disk_train_identically(people, monkeypatch):
    monkeypatch.setenv("RUNNER_CACHE", str(people / "cache"))
    losses = []
    for number, where in enumerate(("true", "false")):
        words = ["data.drop=[wage]", "train.num_steps=20", f"data.in_memory={where}", "data.num_workers=0"]
        found = runner.run([*SMALL, *words], folder=f"run{number}")
        losses.append(found["metrics"]["val/loss"])
        assert json.loads((people / f"run{number}" / "model.json").read_text())["reader"]["target"]["names"] == [
            "group"
        ]
    assert losses[0] == losses[1]


def test_scales_are_from_training_rows_only(own_folder):
    labels = torch.arange(200) % 2
    write_distances(range(200), labels)
    source = table("far.csv")
    cut = {"val_fraction": 0.1, "test_fraction": 0.1, "limit": None, "seed": 0}
    chosen = split(_with(source, (torch.arange(200), labels)), **cut)
    measured = {int(index) for rows in (chosen.val, chosen.test) for index in rows[0]}
    near = [float(index) for index in range(200) if index not in measured]
    write_distances((index + (1_000_000 if index in measured else 0) for index in range(200)), labels)
    runner.run([*SMALL, "data.path=far.csv", "train.num_steps=1"], folder="run")
    columns = json.loads((own_folder / "run" / "model.json").read_text())["model"]["before"]
    assert columns["means"] == columns["fills"] == [pytest.approx(np.mean(near))]
    assert columns["spreads"] == [pytest.approx(np.std(near))]


def test_automatic_choices_are_printed(own_folder, capsys):
    rows = "".join(f"key {index},{index % 7},{'rare' if index % 50 == 0 else 'usual'}\n" for index in range(200))
    Path("odd.csv").write_text("id,x,y\n" + rows)
    runner.run([*SMALL, "data.path=odd.csv", "train.num_steps=1"], folder="run")
    told = [line for line in capsys.readouterr().out.splitlines() if line.startswith("data  ")]
    assert told[1:] == [
        "data     target y (the last column): 2 classes, they are texts",
        "data     left out, because nearly all their texts differ: id",
    ]
    assert all(line in Path("run/runner.log").read_text() for line in told)


def write_distances(distances, labels):
    rows = "".join(f"{far},{label}\n" for far, label in zip(distances, labels.tolist(), strict=True))
    Path("far.csv").write_text("far,y\n" + rows)


def _with(source, rows):
    """Return the source with other rows, and the same labels and splits."""
    from dataclasses import replace

    return replace(source, rows=rows)

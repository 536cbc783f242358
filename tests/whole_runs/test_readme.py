"""README's guides, as they are written: their files are made, and their commands run."""

import re

import numpy as np
import pytest

from runner import cli
from runner.version import PACKAGES

README = (PACKAGES / "README.md").read_text()
BLOCK = re.compile(r"```(\w+)\n(.*?)```", re.DOTALL)
SHORT = ["train.num_steps=3", "tracking.enabled=false"]


def section(title):
    return README.partition(f"## {title}\n")[2].partition("\n## ")[0]


def files_in(text):
    """By path, what the blocks hold that begin with one."""
    blocks = [body for language, body in BLOCK.findall(text) if language in ("python", "yaml")]
    return {body.splitlines()[0].removeprefix("# "): body for body in blocks if body.startswith("# ")}


def commands_in(text):
    """The words of each command, comments and quotes taken off."""
    lines = "".join(body for language, body in BLOCK.findall(text) if language == "bash").splitlines()
    found = [re.sub(r"\s+#.*", "", line).removeprefix("python -m runner ").split() for line in lines if line]
    return [[word.strip("'") for word in words] for words in found]


def test_the_guides_to_what_is_ones_own(own_folder, monkeypatch):
    monkeypatch.syspath_prepend(str(own_folder))
    text = section("Your own model, data, task, metric")
    files = files_in(text)
    assert set(files) == {
        "my_models.py",
        "my_data.py",
        "my_tasks.py",
        "conf/model/net.yaml",
        "conf/data/quadrants.yaml",
    }
    for name, body in files.items():
        assert body.count("\n") <= 15, f"{name} is no short guide"
        (own_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (own_folder / name).write_text(body)
    commands = commands_in(text)
    assert len(commands) == 3
    for words in commands:
        assert cli.main([*words, *SHORT]) == 0, words


@pytest.mark.slow
def test_data_of_every_kind_and_what_comes_after(own_folder, monkeypatch):
    import pandas as pd
    from PIL import Image

    draw = np.random.default_rng(0)
    columns = {"age": draw.integers(18, 80, 200), "city": draw.choice(["Rome", "Lyon"], 200)}
    people = pd.DataFrame({**columns, "buys": draw.choice(["yes", "no"], 200)})
    people.to_csv("people.csv", index=False)
    people.drop(columns="buys").to_csv("new.csv", index=False)
    for name in ("cat", "dog"):
        (own_folder / "pictures" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(0, 256, (70, 80, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(own_folder / "pictures" / name / f"{number}.png")
    (own_folder / "book.txt").write_text("It was a day like any other day. " * 200)
    *others, of_the_table = reversed(commands_in(section("Data and models")))
    for words in [*others, of_the_table]:
        assert cli.main([*words, *SHORT]) == 0, words
    for words in commands_in(section("After training")):
        if words[0] in ("evaluate", "predict", "export"):
            assert cli.main(words) == 0, words
    answers = pd.read_csv("answers.csv")
    assert list(answers) == ["label", "probability", "p_no", "p_yes"]
    assert len(answers) == 200


def test_every_picture_is_there():
    for name in re.findall(r"\]\((\.github/[^)]+)\)", README):
        assert (PACKAGES / name).is_file(), name

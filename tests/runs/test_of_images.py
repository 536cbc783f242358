"""A run on a folder of images, from its images to its predictions for other images."""

import contextlib
import csv
import io

import numpy as np
import pytest
from PIL import Image

from runner import cli

SHORT = ["device=cpu", "model=cnn", "model.channels=[8]", "train.num_epochs=12", "train.batch_size=8"]
SHORT += ["optimizer.lr=0.02"]


@pytest.fixture
def shapes(own_folder):
    """Write bright and dark images, 8 x 8."""
    draw = np.random.default_rng(0)
    for name, low in (("bright", 150), ("dark", 0)):
        (own_folder / "shapes" / name).mkdir(parents=True)
        for number in range(20):
            pixels = draw.integers(low, low + 100, (8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(own_folder / "shapes" / name / f"{number}.png")
    with contextlib.redirect_stdout(io.StringIO()):
        words = ["data=images", "data.path=shapes", *SHORT, "tracking.enabled=false", "hydra.run.dir=run"]
        assert cli.main(words) == 0
    return own_folder


def test_predictions_name_their_files(shapes):
    assert cli.main(["predict", "run", "--input", "shapes/bright", "--output", "answers.csv", "--batch-size", "7"]) == 0
    with (shapes / "answers.csv").open() as stream:
        rows = list(csv.DictReader(stream))
    assert sorted(row["file"] for row in rows) == sorted(f"shapes/bright/{number}.png" for number in range(20))
    assert {row["label"] for row in rows} == {"bright"}
    assert cli.main(["predict", "run", "--input", "shapes/dark/3.png", "--output", "one.csv"]) == 0
    with (shapes / "one.csv").open() as stream:
        (row,) = csv.DictReader(stream)
    assert (row["file"], row["label"]) == ("shapes/dark/3.png", "dark")
    assert (shapes / "run" / "plots" / "samples.png").is_file()

"""Loads the data sets that scikit-learn ships: small tables by their names, and the handwritten digits."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch

from runner.config.checks import one_of
from runner.data.source import Source, facts_of, from_arrays
from runner.data.tables.encoder import Column, Columns, TableTarget, reader_node
from runner.data.tables.table import fit
from runner.data.vision.augment import Augmentations, augmented


def digits(augment: Augmentations = None) -> Source:
    """Return images (1797, 1, 8, 8) in 0..1 and classes 0..9 (UCI optical recognition of handwritten digits)."""
    # (1797, 65): 64 pixels in 0..16, then the class
    rows = np.loadtxt(shipped("digits.csv.gz"), delimiter=",", dtype=np.uint8)
    images = rows[:, :-1].reshape(-1, 1, 8, 8) / 16
    source = from_arrays(images, rows[:, -1].astype(np.int64), name="digits")
    return augmented(replace(source, origin="scikit-learn load_digits"), augment)


def shipped(name: str) -> Path:
    """Return a file of scikit-learn's data. Importing the library takes a second in every job of a sweep."""
    found = importlib.util.find_spec("sklearn")
    assert found is not None and found.origin is not None  # a dependency of ours
    return Path(found.origin).parent / "datasets" / "data" / name


CELL = (
    "radius, texture, perimeter, area, smoothness, compactness, concavity, concave points, symmetry, fractal dimension"
)
CELL_COLUMNS = tuple(form.format(name) for form in ("mean {}", "{} error", "worst {}") for name in CELL.split(", "))
WINE_COLUMNS = (
    "alcohol, malic_acid, ash, alcalinity_of_ash, magnesium, total_phenols, flavanoids, nonflavanoid_phenols, "
    "proanthocyanins, color_intensity, hue, od280/od315_of_diluted_wines, proline"
)


@dataclass(frozen=True)
class Set:
    file: str  # in scikit-learn's folder of data; with a first line of sizes and classes, where it has classes
    columns: tuple[str, ...]
    classes: tuple[str, ...] = ()
    target: str = "target"
    targets_file: str = ""


SETS = {
    "breast_cancer": Set("breast_cancer.csv", CELL_COLUMNS, ("malignant", "benign"), "diagnosis"),
    "diabetes": Set(
        "diabetes_data_raw.csv.gz",
        ("age", "sex", "bmi", "bp", "s1", "s2", "s3", "s4", "s5", "s6"),
        target="progression",
        targets_file="diabetes_target.csv.gz",
    ),
    "iris": Set(
        "iris.csv",
        ("sepal length (cm)", "sepal width (cm)", "petal length (cm)", "petal width (cm)"),
        ("setosa", "versicolor", "virginica"),
        "species",
    ),
    "wine": Set("wine_data.csv", tuple(WINE_COLUMNS.split(", ")), ("class_0", "class_1", "class_2"), "cultivar"),
}


def scikit(which: Annotated[str, one_of(SETS)], dtype: str = "float32") -> Source:
    """Return breast_cancer (569 rows, 30 numbers, 2 classes), diabetes (442, 10, a regression), iris (150, 4, 3) or wine (178, 13, 3).

    A layer in front of the model scales the values, fitted on the training split, and one behind it scales a regression back.
    """
    found = SETS[which]
    values = _numbers(found.file, skip=bool(found.classes))
    if found.classes:
        inputs, targets = values[:, :-1], torch.from_numpy(values[:, -1].astype(np.int64))
    else:
        inputs, targets = values, torch.from_numpy(_numbers(found.targets_file).astype(dtype))
    rows = torch.from_numpy(np.ascontiguousarray(inputs, dtype=dtype)), targets
    columns = Columns(tuple(Column(column, "number") for column in found.columns), dtype=dtype)
    kind = "classification" if found.classes else "regression"
    return Source(
        which,
        rows,
        facts_of(*rows, num_classes=len(found.classes) or None),
        labels=targets if found.classes else None,
        origin=f"scikit-learn {found.file}",
        classes=found.classes,
        targets=() if found.classes else (found.target,),
        around=partial(fit, sizes=columns.sizes, scale_targets=not found.classes),
        reader=reader_node(columns, TableTarget((found.target,), kind, found.classes)),
    )


def _numbers(file: str, *, skip: bool = False) -> np.ndarray:
    delimiter = None if file.endswith(".gz") else ","
    return np.loadtxt(shipped(file), delimiter=delimiter, skiprows=int(skip), ndmin=2)

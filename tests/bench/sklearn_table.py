"""Our MLP compared with scikit-learn's on the tables it ships, one table of what both reach: `python tests/bench/sklearn_table.py`.

Both get the same rows: for each seed a fifth of a set is held back and measured on, and all others are trained on.
scikit-learn's MLPClassifier and MLPRegressor have their default settings and the seed as their random_state, once on the
values as they are and once behind a StandardScaler. Ours is conf/experiment/sklearn_SET.yaml, whose recipe was chosen on
validation rows of other splits (seeds 10 to 14): sets this small share rows between these and what is measured on here.
"""

from __future__ import annotations

import math
import tempfile
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
from harness import head, header, parser, row, section, spread

import runner
from runner.data.builtin.scikit import digits, scikit
from runner.data.source import Source
from runner.data.split import split

TEST_FRACTION = 0.2
SETS = ("digits", "breast_cancer", "wine", "diabetes")
PEERS = ("runner", "scikit-learn", "scikit-learn, scaled")


def ours(name: str, seed: int, source: Source, words: Sequence[str] = ()) -> dict[str, float]:
    """Return the results of the experiment on the rows that are held out."""
    with tempfile.TemporaryDirectory() as folder:
        overrides = [f"experiment=sklearn_{name}", f"seed={seed}", "device=cpu", "tracking.enabled=false", *words]
        found = runner.run(overrides, folder=folder)["metrics"]
    if source.classes:
        return {"accuracy": found["test/accuracy"]}
    return _errors(found["test/loss"], _arrays(source, seed)[3])


def theirs(seed: int, source: Source, *, is_scaled: bool) -> dict[str, float]:
    from sklearn.neural_network import MLPClassifier, MLPRegressor
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    x, y, x_test, y_test = _arrays(source, seed)
    model: Any = (MLPClassifier if source.classes else MLPRegressor)(random_state=seed)
    model = make_pipeline(StandardScaler(), model) if is_scaled else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the default settings include 200 epochs, after which scikit-learn warns
        told = model.fit(x, y.ravel()).predict(x_test)
    if source.classes:
        return {"accuracy": float((told == y_test).mean())}
    return _errors(float(((told - y_test.ravel()) ** 2).mean()), y_test)


def _errors(mean_square: float, targets: Any) -> dict[str, float]:
    return {"R2": 1 - mean_square / float(np.var(targets)), "RMSE": math.sqrt(mean_square)}


def _arrays(source: Source, seed: int) -> tuple[Any, Any, Any, Any]:
    rows = split(source, val_fraction=0, test_fraction=TEST_FRACTION, limit=None, seed=seed)
    return tuple(part.flatten(1).numpy() if part.dim() > 2 else part.numpy() for part in (*rows.train, *rows.test))  # type: ignore[return-value]


def main() -> None:
    options = parser(__doc__)
    options.add_argument("--seeds", type=int, default=5)
    options.add_argument("--sets", nargs="*", default=SETS)
    given = options.parse_args()
    with section("sklearn_table.py", write=given.write):
        print(header(given.seeds, packages=("torch", "scikit-learn", "numpy")))
        head("set, measure", *(f"{peer}, {what}" for peer in PEERS for what in ("median", "lowest to highest")))
        for name in given.sets:
            source = digits() if name == "digits" else scikit(name)
            results = [
                [ours(name, seed, source) for seed in range(given.seeds)],
                [theirs(seed, source, is_scaled=False) for seed in range(given.seeds)],
                [theirs(seed, source, is_scaled=True) for seed in range(given.seeds)],
            ]
            for metric in results[0][0]:
                form = ".2f" if metric == "RMSE" else ".4f"
                row(f"{name}, {metric}", *(spread([each[metric] for each in peer], form) for peer in results))


main()

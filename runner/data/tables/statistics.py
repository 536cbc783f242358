"""Computes statistics of the training rows' columns, chunk by chunk, for the layers around the model."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.source import Preprocessing
from runner.data.tables.scan import Moments

COLUMNS, SCALED = "runner.models.TableColumns", "runner.models.Scaled"
#: read at a time; what is computed of them takes some ten times as much
CHUNK_FLOATS = 2**18


def fit(
    train_rows: Any,
    *,
    sizes: Sequence[int],
    flagged: Sequence[int] = (),
    normalize: bool = True,
    scale_targets: bool = False,
) -> Preprocessing:
    """Return the layers around a model: means, spreads and the categories that occur in the training rows.

    Args:
        train_rows: (inputs, targets) tensors, or a Dataset of whole batches, of which 1 MiB is read at a time.
        sizes: As in TableColumns.
    """
    numbers = [place for place, size in enumerate(sizes) if not size]
    met = [np.zeros(size, bool) for size in sizes]
    missing = np.zeros(len(flagged), bool)
    inputs, targets = Moments(len(numbers)), None
    for rows, some in _chunks(train_rows, len(sizes)):
        inputs.update(rows[:, numbers])
        missing |= np.isnan(rows[:, list(flagged)]).any(0)
        for place, size in enumerate(sizes):
            if size:
                codes = rows[:, place]
                met[place][codes[codes >= 0].astype(np.int64)] = True
        if scale_targets:
            targets = targets or Moments(some.shape[1])
            targets.update(some)
    nothing = [0.0] * len(numbers), [1.0] * len(numbers)
    means, spreads = (inputs.mean.tolist(), inputs.spread().tolist()) if normalize else nothing
    seen = np.concatenate([*met, missing]).astype(int).tolist()
    before = {
        "_target_": COLUMNS,
        "sizes": list(sizes),
        "means": means,
        "spreads": spreads,
        "fills": inputs.mean.tolist(),
        "flagged": list(flagged),
        "seen": seen,
    }
    if targets is None:
        return Preprocessing(before, keeps_inputs=False)
    after = {"_target_": SCALED, "means": targets.mean.tolist(), "spreads": targets.spread().tolist()}
    return Preprocessing(before, after, keeps_inputs=False)


def _chunks(rows: Any, width: int) -> Iterator[tuple[Any, Any]]:
    step = max(1, CHUNK_FLOATS // max(1, width))
    if isinstance(rows, Dataset):
        for start in range(0, len(rows), step):  # type: ignore[arg-type]
            inputs, targets = rows.__getitems__(range(start, min(start + step, len(rows))))  # type: ignore[attr-defined, arg-type]
            yield inputs.numpy(), targets.numpy()
        return
    inputs, targets = rows
    assert isinstance(inputs, Tensor)
    for some, others in zip(inputs.split(step), targets.split(step), strict=True):
        yield some.numpy(), others.numpy()

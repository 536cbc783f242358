"""Find the position of a replayed step's rows in the data, and unusually large numbers in them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from omegaconf import DictConfig

from runner.config import validate
from runner.data import split
from runner.data.loading.order import permutation
from runner.data.loading.own_loader import OwnLoader
from runner.data.sampler import sampler_of
from runner.device.placement import tensors
from runner.tools.explain.blame import Picked
from runner.tools.explain.replay import Moment

#: rows that are printed
MAX_ROWS = 5
#: a number is unusual from this multiple of the largest other one in its column
FAR_OUT = 1e3


@dataclass(frozen=True)
class NamedRow:
    """A row of a batch, and its position in the data."""

    row: int  # in its batch, from 0
    batch: int  # in its epoch, from 0
    in_split: int | None = None  # in the training split, from 0; None: unknown
    in_data: int | None = None  # in the data before it was split
    place: str = ""  # people.csv, line 17
    loss: float | None = None  # of this row only
    column: str = ""  # of an unusual number
    value: float | None = None


def placed(moment: Moment, cfg: DictConfig, picked: Sequence[Picked]) -> list[NamedRow]:
    """Return rows of the replayed batches with their position in the data."""
    parts, (epoch, first) = moment.parts, moment.place
    source, count, places = parts.source, parts.train.num_rows, None
    if picked and not isinstance(parts.splits.train, OwnLoader):
        sampler = sampler_of(validate.shared_data_settings(cfg)["sampler"], parts.splits.labels, source)
        order = sampler.order(seed=cfg.seed, epoch=epoch) if sampler else permutation(count, seed=cfg.seed, epoch=epoch)
        places = order, split.indices(source, seed=cfg.seed, **validate.how_to_cut(cfg))["train"]
    found = []
    for batch, row, loss in picked:
        column, value = _unusual_number(moment.reached.batches[batch], row, source.columns)
        one = NamedRow(row, first + batch, loss=loss, column=column, value=value)
        if places is not None:
            in_split = int(places[0][one.batch * parts.train.batch_size + row])
            in_data = int(places[1][in_split])
            place = source.place(in_data) if source.place is not None else ""
            one = replace(one, in_split=in_split, in_data=in_data, place=place)
        found.append(one)
    return found


def _unusual_number(batch: Any, row: int, names: Sequence[str]) -> tuple[str, float | None]:
    inputs = next((one for one in tensors(batch) if one.is_floating_point() and one.dim() > 1), None)
    if inputs is None or not row < len(inputs) or len(inputs) < 2:
        return "", None
    values = inputs.detach().cpu().double().flatten(1)
    values = values.nan_to_num(0, torch.inf, -torch.inf) if names else values  # NaN in a table: a missing value
    others = torch.cat([values[:row], values[row + 1 :]]).abs()
    others = torch.where(others.isfinite(), others, 0).amax(0)
    mine = values[row]
    scale = torch.where(others > 0, others, 1.0)  # a rare flag is 1 where all others are 0
    ratio = torch.where(mine.isfinite(), mine.abs() / scale, torch.inf)
    place = int(ratio.argmax())
    if ratio[place] < FAR_OUT or not mine[place]:
        return "", None
    return (names[place] if place < len(names) else f"number {place}"), float(mine[place])

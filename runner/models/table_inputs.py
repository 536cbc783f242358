"""Prepares a table's rows for a model: raw floats to (B, features), scaled, filled where missing, one-hot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class TableColumns(nn.Module):
    """Numbers first, (value - mean) / spread, a missing one (NaN) filled with `fills`; then a 0/1 column for each
    category; then one for each float in `flagged` that is 1 where it is missing.

    sizes: for each float of a row 0 for a number, else how many categories it counts; a category is its number, from 0.
    means, spreads, fills: of the numbers alone, in their order. seen: which categories were met in training, as 0 and 1,
    all columns' one after the other, and then the same of `flagged`; None for all of them. A category that was not met is
    all zeros, as are an unknown (-1) and a missing one: a weight for it would never have been learned.
    Nothing here depends on the values: it is compiled and exported as it is.
    """

    number_places: Tensor
    means: Tensor
    spreads: Tensor
    fills: Tensor
    category_places: Tensor
    categories: Tensor
    flagged_places: Tensor
    flagged_seen: Tensor

    def __init__(
        self,
        sizes: Sequence[int],
        means: Sequence[float],
        spreads: Sequence[float],
        fills: Sequence[float],
        *,
        flagged: Sequence[int] = (),
        seen: Sequence[int] | None = None,
    ) -> None:
        super().__init__()
        numbers = [place for place, size in enumerate(sizes) if not size]
        columns = [place for place, size in enumerate(sizes) for _ in range(size)]
        codes = [float(code) for size in sizes for code in range(size)]
        met = list(seen) if seen is not None else [1] * (len(codes) + len(flagged))
        assert len(numbers) == len(means) == len(spreads) == len(fills)
        assert len(met) == len(codes) + len(flagged)
        # -2 is no category's number: what was not met equals nothing
        codes = [code if is_met else -2.0 for code, is_met in zip(codes, met, strict=False)]
        self.register_buffer("number_places", torch.tensor(numbers, dtype=torch.int64))
        self.register_buffer("means", torch.tensor(means, dtype=torch.float32))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=torch.float32))
        self.register_buffer("fills", torch.tensor(fills, dtype=torch.float32))
        self.register_buffer("category_places", torch.tensor(columns, dtype=torch.int64))
        self.register_buffer("categories", torch.tensor(codes, dtype=torch.float32))
        self.register_buffer("flagged_places", torch.tensor(list(flagged), dtype=torch.int64))
        self.register_buffer("flagged_seen", torch.tensor(met[len(codes) :], dtype=torch.float32))
        self._parts = (bool(numbers), bool(codes), bool(flagged))

    def forward(self, inputs: Tensor) -> Tensor:  # (B, raw floats) -> (B, features)
        has_numbers, has_categories, has_flags = self._parts
        parts = []
        if has_numbers:
            numbers = inputs.index_select(1, self.number_places)
            filled = torch.where(torch.isnan(numbers), self.fills, numbers)
            parts.append((filled - self.means) / self.spreads)
        if has_categories:
            codes = inputs.index_select(1, self.category_places)
            parts.append((codes == self.categories).to(inputs.dtype))
        if has_flags:
            missing = torch.isnan(inputs.index_select(1, self.flagged_places))
            parts.append(missing.to(inputs.dtype) * self.flagged_seen)
        return torch.cat(parts, 1)

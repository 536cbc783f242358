"""Prepare a table's rows for a model: raw floats to (B, features), scaled, with missing values filled, one-hot."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


class TableColumns(nn.Module):
    """Numbers first, (value - mean) / spread, with `fills` for missing ones (NaN); then a 0/1 column per category; then a
    0/1 column per float in `flagged`, 1 if it is missing.

    An unknown (-1), missing or unseen category is all zeros, as its weight would never be trained. The shapes don't depend
    on values, so it can be compiled and exported.

    Args:
        sizes: For each float of a row, 0 for a number, else its number of categories; a category is its index, from 0.
        means, spreads, fills: Of the numbers only, in order.
        seen: Whether each category was in the training data, as 0 or 1, of all columns in order, then the same of
            `flagged`; None: all were.
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
        dtype = torch.get_default_dtype()
        numbers = [place for place, size in enumerate(sizes) if not size]
        columns = [place for place, size in enumerate(sizes) for _ in range(size)]
        codes = [float(code) for size in sizes for code in range(size)]
        met = list(seen) if seen is not None else [1] * (len(codes) + len(flagged))
        assert len(numbers) == len(means) == len(spreads) == len(fills)
        assert len(met) == len(codes) + len(flagged)
        # -2 equals no category
        codes = [code if is_met else -2.0 for code, is_met in zip(codes, met, strict=False)]
        self.register_buffer("number_places", torch.tensor(numbers, dtype=torch.int64))
        self.register_buffer("means", torch.tensor(means, dtype=dtype))
        self.register_buffer("spreads", torch.tensor(spreads, dtype=dtype))
        self.register_buffer("fills", torch.tensor(fills, dtype=dtype))
        self.register_buffer("category_places", torch.tensor(columns, dtype=torch.int64))
        self.register_buffer("categories", torch.tensor(codes, dtype=dtype))
        self.register_buffer("flagged_places", torch.tensor(list(flagged), dtype=torch.int64))
        self.register_buffer("flagged_seen", torch.tensor(met[len(codes) :], dtype=dtype))
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

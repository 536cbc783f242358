"""Draws curves in a terminal's characters: eight dots each where it can show Braille, else one sign. For `watch`."""

from __future__ import annotations

import math

import numpy as np
from numpy.typing import NDArray
from rich.text import Text

from runner.runs.live import Thinned

#: the bit of each dot of a character, by row and column
DOTS = np.array([[0x01, 0x08], [0x02, 0x10], [0x04, 0x20], [0x40, 0x80]])
BRAILLE = 0x2800


class Canvas:
    """A field of characters. What is drawn later takes a character whole."""

    def __init__(
        self, width: int, height: int, *, low: float, high: float, is_log: bool = False, plain: bool = False
    ) -> None:
        """low, high: the values at its edges. plain: no Braille."""
        self.width, self.height, self.plain = width, height, plain
        self.down, self.across = (1, 1) if plain else DOTS.shape
        self.columns = width * self.across
        self._is_log = is_log
        self._low, self._high = (math.log(low), math.log(high)) if is_log else (low, high)
        self._dots = np.zeros((height, width), int)
        self._styles = np.full((height, width), "", object)

    def curve(self, curve: Thinned, style: str, *, band: str = "") -> None:
        """A line through the means, over a band from the least to the greatest values (band: its style; "" for none)."""
        is_there = np.flatnonzero(~np.isnan(curve.mean))
        if not len(is_there):
            return
        if band:
            self._fill(is_there, self._rows(curve.greatest[is_there]), self._rows(curve.least[is_there]), band)
        rows = self._rows(curve.mean[is_there])
        columns = np.arange(is_there[0], is_there[-1] + 1)
        between = np.rint(np.interp(columns, is_there, rows)).astype(int)
        after = np.append(between[1:], between[-1])  # down or up to where the next column goes on
        reach = np.where(after > between, after - 1, np.where(after < between, after + 1, between))
        self._fill(columns, np.minimum(between, reach), np.maximum(between, reach), style)

    def lines(self) -> list[Text]:
        """Row by row."""
        found = []
        for dots, styles in zip(self._dots, self._styles, strict=True):
            line = Text(no_wrap=True, end="")
            for bits, style in zip(dots.tolist(), styles.tolist(), strict=True):
                line.append((("*" if self.plain else chr(BRAILLE + bits)) if bits else " "), style)
            found.append(line)
        return found

    def _rows(self, values: NDArray[np.float64]) -> NDArray[np.int64]:
        heights = np.log(values) if self._is_log else values
        share = (self._high - heights) / ((self._high - self._low) or 1.0)
        most = self.height * self.down - 1
        rows: NDArray[np.int64] = np.clip(np.rint(share * most), 0, most).astype(np.int64)
        return rows

    def _fill(self, columns: NDArray[np.int64], top: NDArray[np.int64], bottom: NDArray[np.int64], style: str) -> None:
        dots = np.zeros((self.height * self.down, self.columns), bool)
        rows = np.arange(len(dots))[:, None]
        dots[:, columns] = (rows >= top) & (rows <= bottom)
        cells = dots.reshape(self.height, self.down, self.width, self.across)
        bits = (cells * (np.ones((1, 1), int) if self.plain else DOTS)[:, None, :]).sum((1, 3))
        self._dots = np.where(bits > 0, bits, self._dots)
        self._styles = np.where(bits > 0, style, self._styles)

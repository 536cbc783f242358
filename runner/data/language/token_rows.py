"""Reads batches of chunks from a token file, each when it is asked for, as a map-style Dataset."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset

from runner.data.language.token_files import mapped
from runner.data.language.windows import num_windows

#: of a fingerprint: so many blocks of so many bytes, evenly spread
FINGERPRINT_BLOCKS, FINGERPRINT_BYTES = 256, 2**14


class TokenRows(Dataset[Any]):
    """Row i is a chunk around token i * T, as runner.data.language.windows.ChunkWindows takes it: (B, T + 1) or (B, 2 T + 1).

    Reading one costs its own pages of the file. In another process it maps the file anew.
    """

    def __init__(self, file: Path, dtype: str, context_length: int, *, is_random: bool) -> None:
        self._file, self._dtype, self._length, self._is_random = file.resolve(), dtype, context_length, is_random
        self._tokens: NDArray[Any] | None = None
        self._num_rows = num_windows(len(self.tokens), context_length)

    @property
    def tokens(self) -> NDArray[Any]:
        if self._tokens is None:
            self._tokens = mapped(self._file, self._dtype)
        return self._tokens

    @property
    def fingerprint(self) -> str:
        """SHA-256 of its size and of 256 blocks of it: 4 MiB are read."""
        content = self.tokens.view(np.uint8)
        digest = hashlib.sha256(f"{self._dtype} {len(content)} {self._length}".encode())
        step = max(1, (len(content) - FINGERPRINT_BYTES) // (FINGERPRINT_BLOCKS - 1))
        for start in range(0, len(content), max(step, FINGERPRINT_BYTES)):
            digest.update(content[start : start + FINGERPRINT_BYTES].tobytes())
        return digest.hexdigest()

    def __len__(self) -> int:
        return self._num_rows

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        chunks, most = self.__getitems__([index])
        return chunks[0], most[0]

    def __getitems__(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """The batch, ready: chunks in int32, which every device has, and how far each may be moved back."""
        length, back = self._length, self._length if self._is_random else 0
        chunks = np.zeros((len(indices), back + length + 1), np.int32)
        for row, index in zip(chunks, indices, strict=True):
            start = index * length - back
            row[max(0, -start) :] = self.tokens[max(0, start) : index * length + length + 1]
        most = [min(length - 1, index * length) for index in indices]
        return torch.from_numpy(chunks), torch.tensor(most)

    def collate_fn(self, batch: Any) -> Any:
        """A batch of `__getitems__` as it is, or rows put together."""
        if isinstance(batch, list):
            return tuple(torch.stack(parts) for parts in zip(*batch, strict=True))
        return batch

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_tokens": None}  # NumPy would send the content

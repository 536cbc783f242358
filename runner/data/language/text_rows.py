"""Turns texts into rows of tokens, (N, T) int64: bytes, or a tokenizer.json's. Cuts and pads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.data.language.vocabulary import tokenizer_of
from runner.errors import Fault, RunnerError, nearest

BYTES = "bytes"
NUM_BYTES = 256
#: what tokenizers call the token that fills a row up
PADDING = ("[PAD]", "<pad>", "<|pad|>", "<PAD>", "<|padding|>", "<|finetune_right_pad_id|>")
#: targets that count for nothing, as torch's cross-entropy has it
IGNORED = -100


class TextRows:
    """Texts to rows of `length` tokens. What is longer is cut, what is shorter is filled up with `padding`.

    entries: the content of a tokenizer.json; None for bytes, of which 256 is the padding. A tokenizer without a padding
    token gets one more. Raises: RunnerError for a content that is no tokenizer's.
    """

    def __init__(self, entries: str | None, length: int, *, asked: str = "data.tokenizer") -> None:
        # a node may hold no ${, and in JSON this is the same
        self.entries = None if entries is None else entries.replace("$", "\\u0024")
        self.length = length
        self._tokenizer = None if entries is None else tokenizer_of(entries, asked=asked)
        if self._tokenizer is None:
            self.padding, self.vocab_size = NUM_BYTES, NUM_BYTES + 1
        else:
            known = self._tokenizer.get_vocab(with_added_tokens=True)
            count = max(known.values(), default=0) + 1
            self.padding = next((known[name] for name in PADDING if name in known), count)
            self.vocab_size = max(count, self.padding + 1)

    def encode(self, texts: Sequence[str]) -> Tensor:  # -> (N, length) int64
        rows = torch.full((len(texts), self.length), self.padding)
        for row, text in zip(rows, texts, strict=True):
            numbers = self._numbers(text)[: self.length]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        return rows

    def next_tokens(self, rows: Tensor) -> tuple[Tensor, Tensor]:  # (N, length) -> twice (N, length - 1)
        """Inputs, and at each place the token that follows; padding counts for nothing."""
        targets = rows[:, 1:]
        return rows[:, :-1].contiguous(), torch.where(targets == self.padding, IGNORED, targets)

    def _numbers(self, text: str) -> list[int]:
        if self._tokenizer is None:
            return list(text.encode())
        # one by one: its threads for batches do not survive the fork of the loader's workers
        return list(self._tokenizer.encode(text).ids)


def entries_of(tokenizer: str) -> str | None:
    """What data.tokenizer names: None for bytes, or a file's content. Raises: RunnerError for a file that is not there."""
    if tokenizer == BYTES:
        return None
    file = Path(tokenizer).expanduser()
    if not file.is_file():
        there = [str(item) for item in file.parent.glob("*.json")] if file.parent.is_dir() else []
        hits = nearest(tokenizer, (BYTES, *there)) or [BYTES, *there]
        problem = f"it is {BYTES} or a tokenizer.json, and there is no file {file}"
        raise RunnerError(
            Fault(f"data.tokenizer={tokenizer}", problem, " or ".join(f"data.tokenizer={hit}" for hit in hits[:3]))
        )
    return file.read_text(encoding="utf-8", errors="replace")

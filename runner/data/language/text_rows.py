"""Turns texts into rows of tokens, (N, T) int64: bytes, or a tokenizer.json's. Cuts and pads them."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor

from runner.data.language.vocabulary import tokenizer_of
from runner.errors import RunnerError, nearest

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
        self._num_texts = self._num_cut = 0  # that were encoded here
        self._longest = 0
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
            numbers = self._numbers(text)
            self._longest = max(self._longest, len(numbers))
            self._num_cut += len(numbers) > self.length
            numbers = numbers[: self.length]
            row[: len(numbers)] = torch.tensor(numbers, dtype=torch.int64)
        self._num_texts += len(texts)
        return rows

    def what_was_cut(self) -> str:
        """Of the texts that were encoded so far, in words; empty where each is whole."""
        if not self._num_cut:
            return ""
        texts = f"{self._num_cut:,} of {self._num_texts:,} texts that were read"
        return f"{texts} have more than {self.length:,} tokens (up to {self._longest:,}), and are cut there"

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
        problem = f"`data.tokenizer` must be `{BYTES}` or a `tokenizer.json`, and there is no file `{file}`"
        ways = [f"data.tokenizer={hit}" for hit in hits[:3]]
        raise RunnerError.suggest(f"data.tokenizer={tokenizer}", problem, ways, code="missing-file")
    return file.read_text(encoding="utf-8", errors="replace")

"""A Source, fractions and a seed go in; its splits come out: drawn on the host, the same everywhere."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from runner.data.source import Source, copy_rows
from runner.errors import Fault, RunnerError
from runner.placement import num_rows, tensors

#: a fingerprint reads at most so many bytes of each tensor, evenly spread: a big set must not cost seconds
FINGERPRINT_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Splits:
    train: Any  # nested tensors on the host, or a Dataset
    val: Any | None
    test: Any | None
    sizes: dict[str, int]
    fingerprint: str  # SHA-256 of the whole source, hexadecimal


def split(source: Source, *, val_fraction: float, test_fraction: float, limit: int | None, seed: int) -> Splits:
    """Cuts the source by a CPU generator; where it has labels, each class is cut in the same proportion.

    A split that the source brings itself is used whole and not cut again. limit: rows kept before the cut, None for all.
    Raises: RunnerError when a split would be empty.
    """
    generator = torch.Generator().manual_seed(seed)
    total = _length(source.rows)
    fractions = {
        "test": 0.0 if "test" in source.given else test_fraction,
        "val": 0.0 if "val" in source.given else val_fraction,
    }
    if sum(fractions.values()) >= 1:
        asked = f"data.val_fraction={val_fraction} data.test_fraction={test_fraction}"
        raise RunnerError(
            Fault(asked, "together they leave nothing to train on", "data.val_fraction=0.1 data.test_fraction=0.1")
        )
    rest = _spread(torch.arange(total), source.labels, generator)
    if limit is not None:
        rest = rest[:limit]
    parts: dict[str, Tensor] = {}
    kept = len(rest)
    for name, fraction in fractions.items():
        count = round(kept * fraction)
        if fraction > 0 and count == 0:
            so = f"of {kept} rows that is none"
            raise RunnerError(Fault(f"data.{name}_fraction={fraction}", so, f"more rows, or data.{name}_fraction=0"))
        parts[name], rest = _take(rest, source.labels, count, generator)
    if len(rest) == 0:
        raise RunnerError(
            Fault(f"data={source.name}", f"{kept} rows leave nothing to train on", "more rows, or smaller fractions")
        )
    found = {"train": _select(source.rows, rest)}
    for name in ("val", "test"):
        if name in source.given:
            found[name] = source.given[name]
        elif len(parts[name]):
            found[name] = _select(source.rows, parts[name])
    sizes = {name: _length(rows) for name, rows in found.items()}
    return Splits(found["train"], found.get("val"), found.get("test"), sizes, fingerprint(source))


def fingerprint(source: Source) -> str:
    """SHA-256 over the source's values, shapes and types; of a Dataset, over its name and length."""
    digest = hashlib.sha256()
    for rows in (source.rows, *source.given.values()):
        if isinstance(rows, Dataset):
            digest.update(f"{type(rows).__name__} {_length(rows)}".encode())
            continue
        for tensor in tensors(rows):
            digest.update(f"{tuple(tensor.shape)} {tensor.dtype}".encode())
            flat = tensor.contiguous().reshape(-1).view(torch.uint8) if tensor.numel() else tensor
            stride = max(1, flat.numel() // FINGERPRINT_BYTES)
            digest.update(np.ascontiguousarray(flat[::stride].numpy()).data)
    return digest.hexdigest()


def _spread(indices: Tensor, labels: Tensor | None, generator: torch.Generator) -> Tensor:
    """A random order in which every beginning has the classes in about the same proportion as the whole."""
    order = indices[torch.randperm(len(indices), generator=generator)]
    if labels is None:
        return order
    classes = labels[order]
    position = torch.empty(len(order), dtype=torch.float64)
    for label in classes.unique():
        members = (classes == label).nonzero()[:, 0]
        # the k-th of n members of a class goes to the fraction (k + u) / n of the whole
        jitter = torch.rand(1, generator=generator, dtype=torch.float64)
        position[members] = (torch.arange(len(members), dtype=torch.float64) + jitter) / len(members)
    return order[torch.argsort(position, stable=True)]


def _take(indices: Tensor, labels: Tensor | None, count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """`count` of the indices, evenly spread over the classes, and the others."""
    if count == 0:
        return indices[:0], indices
    order = _spread(indices, labels, generator)
    return order[:count], order[count:]


def _select(rows: Any, indices: Tensor) -> Any:
    if isinstance(rows, Dataset):
        return Subset(rows, indices.tolist())
    return copy_rows(rows, indices)


def _length(rows: Any) -> int:
    return len(rows) if isinstance(rows, Dataset) else num_rows(rows)  # type: ignore[arg-type]

"""Splits a Source into training, validation and test rows by fractions or folds and a seed, on the host."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset

from runner.data.loading.order import SPLIT, generator
from runner.data.loading.own_loader import OwnLoader
from runner.data.source import GIVEN, Source
from runner.device.placement import map_tensors, num_rows, tensors
from runner.errors import Problem, refuse

#: a fingerprint reads this many bytes of a tensor, of larger ones in this many evenly spread blocks
FINGERPRINT_BYTES, FINGERPRINT_BLOCKS = 64 * 2**20, 1024
#: of a source without its own validation split
TEST_FRACTION = 0.1


@dataclass(frozen=True)
class Splits:
    """The rows of each split; None without one."""

    train: Any  # nested tensors on the host, a Dataset, or Chosen
    val: Any | None
    test: Any | None
    sizes: dict[str, int]
    fingerprint: str  # of the whole source, 64 hexadecimal digits; see `fingerprint()`
    labels: Tensor | None = None  # (N,) int64, of the training rows


@dataclass(frozen=True)
class Chosen:
    """A split's rows in a set that several runs share."""

    whole: Any  # nested tensors on the host
    indices: Tensor  # (K,) int64, ascending


def rows_of(rows: Any) -> Any:
    """Return the rows of a split; those of a shared set are copied."""
    return select(rows.whole, rows.indices) if isinstance(rows, Chosen) else rows


def split(
    source: Source,
    *,
    val_fraction: float,
    test_fraction: float | None,
    limit: int | None,
    seed: int,
    fold: tuple[int, int] | None = None,
) -> Splits:
    """Cut the source by the seed, each class in the same proportion if it has labels. Rows keep their order within a split.

    A split that the source has is used as it is. A source that is `in_order` is cut into blocks: training, validation, test.

    Args:
        test_fraction: None for TEST_FRACTION, or 0 if the source has its own validation split.
        limit: The number of rows that are kept before the cut, in the classes' proportions; None for all.
        fold: (K, N) divides all but the test split into N parts; the validation split is part K, from 0.

    Raises:
        RunnerError: A split would be empty, or the source can't be divided.
    """
    labels = None
    if isinstance(source.rows, OwnLoader):  # its rows have no indices
        refuse(_not_cut(limit, fold))
        found = {**source.given, "train": source.rows}
    else:
        how: dict[str, Any] = {"val_fraction": val_fraction, "test_fraction": test_fraction, "limit": limit}
        chosen = indices(source, seed=seed, fold=fold, **how)
        found = {**source.given, **{name: select(source.rows, rows) for name, rows in chosen.items()}}
        labels = None if source.labels is None else source.labels[chosen["train"]]
    sizes = {name: length(found[name]) for name in ("train", *GIVEN) if name in found}
    return Splits(found["train"], found.get("val"), found.get("test"), sizes, fingerprint(source), labels)


def indices(
    source: Source,
    *,
    val_fraction: float,
    test_fraction: float | None,
    limit: int | None,
    seed: int,
    fold: tuple[int, int] | None = None,
) -> dict[str, Tensor]:
    """Return the indices of each split that is cut from the source, ascending; see split()."""
    if test_fraction is None:
        test_fraction = 0.0 if "val" in source.given else TEST_FRACTION
    cut = {"test": test_fraction} if fold else {"test": test_fraction, "val": val_fraction}
    cut = {name: fraction for name, fraction in cut.items() if name not in source.given and fraction > 0}
    draw = generator(seed, SPLIT)
    rest = torch.arange(length(source.rows))
    if limit is not None and limit < len(rest):
        rest = rest[:limit] if source.in_order else take(rest, limit, labels=source.labels, generator=draw)[0]
    counts = {name: round(len(rest) * fraction) for name, fraction in cut.items()}
    problems = _empty_splits(len(rest), cut, counts)
    if fold is not None:
        problems += _no_folds(source, fold, len(rest) - sum(counts.values()))
    refuse(problems)
    found = {}
    for name, count in counts.items():
        if source.in_order:
            rest, taken = rest[:-count], rest[-count:]
        else:
            taken, rest = take(rest, count, labels=source.labels, generator=draw)
        found[name] = taken
    if fold is not None:
        is_taken = folds(rest, fold[1], labels=source.labels, generator=draw) == fold[0]
        found["val"], rest = rest[is_taken], rest[~is_taken]
    return {**found, "train": rest}


def take(
    indices: Tensor,  # (K,) int64, ascending
    count: int,
    *,
    labels: Tensor | None,  # (N,) int64
    generator: torch.Generator,
) -> tuple[Tensor, Tensor]:
    """Return `count` random indices and the others, both ascending.

    With labels, the number of rows of a class differs from its exact share by less than one; a single row is taken last.
    """
    order = torch.randperm(len(indices), generator=generator)
    if labels is None:
        return indices[order[:count].sort().values], indices[order[count:].sort().values]
    classes, sizes = labels[indices[order]].unique(return_inverse=True, return_counts=True)[1:]
    share = _shares(sizes, count, generator)
    by_class = classes.argsort(stable=True)
    rank = torch.empty_like(by_class)  # of each row within its class, in random order
    rank[by_class] = torch.arange(len(order)) - (sizes.cumsum(0) - sizes)[classes[by_class]]
    is_taken = rank < share[classes]
    return indices[order[is_taken].sort().values], indices[order[~is_taken].sort().values]


def folds(
    indices: Tensor,  # (K,) int64, ascending
    num: int,
    *,
    labels: Tensor | None,  # (N,) int64
    generator: torch.Generator,
) -> Tensor:
    """Return (K,) int64, the random fold of each index. Folds differ by at most one row, and so does each class in them."""
    order = torch.randperm(len(indices), generator=generator)
    if labels is not None:
        order = order[labels[indices[order]].argsort(stable=True)]
    found = torch.empty_like(order)
    found[order] = torch.arange(len(order)) % num
    return found


def _shares(sizes: Tensor, count: int, generator: torch.Generator) -> Tensor:
    """Return (C,) numbers of rows, `count` in all, by Hamilton's method in integers; equal remainders are drawn."""
    whole = sizes * count
    total = int(sizes.sum())
    share, remainder = whole // total, whole % total
    remainder[sizes == 1] = -1
    order = torch.randperm(len(sizes), generator=generator)
    largest = order[remainder[order].argsort(descending=True, stable=True)]
    share[largest[: count - int(share.sum())]] += 1
    return share


def select(rows: Any, indices: Tensor) -> Any:
    """Return the rows at `indices`, (K,) int64, ascending; the same object for all rows."""
    if len(indices) == length(rows):
        return rows
    if isinstance(rows, Dataset):
        first, last = int(indices[0]), int(indices[-1])
        is_block = last - first + 1 == len(indices)  # a range, as the list of a large set needs much memory
        return Subset(rows, range(first, last + 1) if is_block else indices.tolist())
    return map_tensors(rows, lambda tensor: tensor.index_select(0, indices))


def length(rows: Any) -> int:
    return len(rows) if isinstance(rows, Dataset) else num_rows(rows)  # type: ignore[arg-type]


def fingerprint(source: Source) -> str:
    """Return the SHA-256 of the source's values, shapes, types and class names, with its own splits.

    Of a tensor over 64 MiB 1,024 blocks are read. A Dataset counts by its class, length and attribute `fingerprint`, or by
    its mapped_tensors(); the buffers of a batch transform count, too. The source's `told` replaces all of its rows.
    """
    digest = hashlib.sha256(repr(source.classes).encode())
    buffers = [] if source.finish is None else list(source.finish.buffers())
    parts = [("rows", source.rows), *sorted(source.given.items())]
    if source.told:
        digest.update(f"{source.told} {[(name, length(rows)) for name, rows in parts]}".encode())
        parts = []
    for name, rows in (*parts, ("finish", buffers)):
        if isinstance(rows, Dataset) and hasattr(rows, "mapped_tensors"):
            rows = rows.mapped_tensors()
        if isinstance(rows, Dataset):
            is_endless = isinstance(rows, OwnLoader) and not rows.has_length  # as long as its run, which may be resumed
            num, content = "" if is_endless else length(rows), getattr(rows, "fingerprint", "")
            digest.update(f"{name} {type(rows).__qualname__} {num} {content}".encode())
            continue
        for tensor in tensors(rows):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
            for block in _blocks(tensor):
                digest.update(block.numpy().data)
    return digest.hexdigest()


def _blocks(tensor: Tensor) -> list[Tensor]:
    if tensor.numel() == 0:
        return []
    flat = tensor.contiguous().reshape(-1).view(torch.uint8)
    if len(flat) <= FINGERPRINT_BYTES:
        return [flat]
    size = FINGERPRINT_BYTES // FINGERPRINT_BLOCKS
    step = (len(flat) - size) // (FINGERPRINT_BLOCKS - 1)
    return [flat[start : start + size] for start in range(0, step * FINGERPRINT_BLOCKS, step)]


def _empty_splits(total: int, cut: dict[str, float], counts: dict[str, int]) -> list[Problem]:
    problems = []
    for name, fraction in cut.items():
        if counts[name] == 0:
            problem = f"`data.{name}_fraction` of {total:,} rows is less than one row"
            fix = f"use `data.{name}_fraction=0`, or more rows"
            problems.append(Problem(f"data.{name}_fraction={fraction}", problem, fix))
    if sum(cut.values()) >= 1 or sum(counts.values()) >= total:
        setting = " ".join(f"data.{name}_fraction={fraction}" for name, fraction in cut.items()) or "data"
        problem = f"the validation and test splits leave none of the {total:,} rows for training"
        problems.append(Problem(setting, problem, "use `data.val_fraction=0.1 data.test_fraction=0.1`, or more rows"))
    return problems


def _not_cut(limit: int | None, fold: tuple[int, int] | None) -> list[Problem]:
    problem, fix = "a custom DataLoader chooses its rows itself", "return tensors or a map-style Dataset"
    settings = {"data.limit": limit, "data.fold": fold and f"{fold[0]}/{fold[1]}"}
    used = {key: value for key, value in settings.items() if value is not None}
    return [Problem(f"{key}={value}", problem, f"use `{key}=null`, or {fix}") for key, value in used.items()]


def _no_folds(source: Source, fold: tuple[int, int], total: int) -> list[Problem]:
    setting = f"data.fold={fold[0]}/{fold[1]}"
    if "val" in source.given:
        problem = f"`{source.name}` has its own validation split, which has no folds"
        return [Problem.suggest(setting, problem, ["data.fold=null"])]
    if source.in_order:  # the random window of a text after a fold would reach into it
        problem = f"neighboring rows of `{source.name}` are related, so a fold would leak into training"
        return [Problem(setting, problem, "use `data.fold=null`, which validates on the last part")]
    if total < fold[1]:
        problem = f"{total:,} rows are too few for {fold[1]:,} folds"
        return [Problem(setting, problem, f"use `data.fold=0/{total}`, or more rows" if total > 1 else "use more rows")]
    return []

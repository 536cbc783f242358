"""Makes a Source of what a `_target_` under `data` returns: rows on the host, and the sizes that they have."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from runner.data.conversion import (
    PAIR,
    STANDARD,
    Called,
    Conversion,
    Rows,
    are_texts,
    batch_of,
    changes,
    is_pair,
    labels_of,
    to_inputs,
    to_targets,
    to_tensor,
    whole_of,
)
from runner.data.loading.own_loader import OwnLoader, Served
from runner.device.placement import num_rows, tensors
from runner.errors import Problem, RunnerError, at_once, nearest

FORMS = (
    "(inputs, targets), {'train': (inputs, targets), 'test': ...}, a torch Dataset or DataLoader, a list of dicts, "
    "or a runner Source"
)
GIVEN = ("val", "test")
#: classes that a note names
MAX_NAMED = 4


@dataclass(frozen=True)
class Preprocessing:
    """The layers around the model, fitted on the training split: nodes of modules, which `build()` makes.

    They hold only plain values (means, categories), so that the model can be made again without the data.
    """

    before: dict[str, Any] | None = None  # inputs of the source -> inputs of the model
    after: dict[str, Any] | None = None  # outputs of the model -> answers in the source's units
    keeps_inputs: bool = True  # whether the source's inputs can be computed from the model's


@dataclass(frozen=True)
class Source:
    """A data set on the host, before it is split."""

    name: str
    rows: Any  # nested tensors that share their first dimension ((inputs, targets) for our tasks), or a Dataset
    facts: dict[str, Any]  # input_shape, in_features, out_features, num_classes (None for a regression)
    labels: Tensor | None = None  # (N,) int64: the splits keep their proportions
    given: Mapping[str, Any] = field(default_factory=dict)  # "val", "test": the rows of splits that exist already
    origin: str = "code"  # shown in MLflow
    notes: tuple[str, ...] = ()  # automatic choices, a line each, for the screen
    classes: tuple[str, ...] = ()  # the names of the classes, by index; () for a regression
    targets: tuple[str, ...] = ()  # the names of a regression's numbers, or of several labels of a row
    around: Callable[[Any], Preprocessing] | None = None  # called with the rows of the training split
    # batch transform: finish(batch, draws) -> batch, on the device (runner.data.loading.batches)
    finish: nn.Module | None = None
    reader: dict[str, Any] | None = None  # the node of the reader of such inputs from a file: reader(path) -> inputs
    columns: tuple[str, ...] = ()  # the names of a row's inputs, one for each number; () without names
    place: Callable[[int], str] | None = None  # the location of a row: "people.csv, line 17"
    in_order: bool = False  # neighboring rows are related (a text's windows): splits are blocks, never drawn
    told: str = ""  # the content, for the fingerprint, wherever the rows are kept; "" to read the rows for it


def as_source(found: Any, *, name: str, conversion: Conversion = STANDARD) -> Source:
    """Make a Source, called `name`, of anything that a user-defined function may return. Raises: RunnerError.

    What the conversion changes is in `notes`. Without columns, nested tensors of any shapes and types are examples.
    """
    setting = f"data={name}"
    if isinstance(found, Source):
        return _checked(_in_precision(replace(found, name=name), conversion), setting)
    if isinstance(found, Mapping) and {"train", *GIVEN} & set(found):
        return _from_splits(found, name, setting, conversion)
    if isinstance(found, DataLoader | IterableDataset):
        return _from_loader(OwnLoader(found, setting=setting), name, conversion)
    if is_pair(found) and any(isinstance(part, Dataset | DataLoader) for part in found):
        problem = "a Dataset in a pair is neither inputs nor targets"
        raise RunnerError.of(setting, problem, "return `{'train': first, 'val': second}`")
    if isinstance(arrays := _arrays_of(found), Dataset):
        return describe_dataset(arrays, name=name, setting=setting, conversion=conversion)
    if not conversion.has_columns:
        return _unconverted(arrays, name, setting, conversion)
    if isinstance(arrays, list | tuple) and len(arrays) == 2:
        inputs, targets = arrays
        # integers of arrays and lists are the numbers of a table, those of tensors are for embeddings
        are_indices = isinstance(inputs, Tensor) and inputs.dtype in (torch.int32, torch.int64)
        source = from_arrays(inputs, targets, name=name, conversion=replace(conversion, keeps_integers=are_indices))
        return replace(source, notes=(*source.notes, *changes(arrays, source.rows), *_renumbered(source.classes)))
    problem = f"the function returned {_described(found)}, and data must be {FORMS}"
    raise RunnerError.of(setting, problem, "return one of these forms")


def _in_precision(source: Source, conversion: Conversion) -> Source:
    if conversion.dtype == torch.float32 or isinstance(source.rows, Dataset | DataLoader):
        return source
    given = {name: conversion.cast(rows) for name, rows in source.given.items()}
    return replace(source, rows=conversion.cast(source.rows), given=given)


def _arrays_of(found: Any) -> Any:
    """Return the tensors of a pair in a TensorDataset, and a list of examples as a Dataset."""
    if isinstance(found, TensorDataset) and len(found.tensors) == 2:
        return tuple(found.tensors)
    is_rows = isinstance(found, list) and found and all(isinstance(row, Mapping | tuple) for row in found)
    return Rows(found) if is_rows and (len(found) != 2 or isinstance(found[0], Mapping)) else found


def _unconverted(found: Any, name: str, setting: str, conversion: Conversion, train: Source | None = None) -> Source:
    """Make a Source of nested tensors for a custom task. train: the training split of another split, whose classes hold."""
    classes: Sequence[str] = ()
    if isinstance(found, list):
        found = tuple(found) if len(found) == 2 else to_tensor(found, Called(setting))
    if is_pair(found) and are_texts(found[1]):
        called = Called(setting, "the targets")
        targets, classes = to_targets(found[1], called, like=train.classes if train else None)
        found = (found[0], targets)
    rows = _tensors_of(found, Called(setting))
    _checked(Source(name, rows, {}), setting)
    pair = TensorDataset(*rows) if is_pair(rows) and all(isinstance(part, Tensor) for part in rows) else None
    source = _describe(name, rows, pair, conversion)
    num_classes = source.facts.get("num_classes")
    if source.labels is not None and not classes and len(source.labels.unique()) == num_classes:
        classes = tuple(map(str, range(num_classes)))
    notes = (*source.notes, *_renumbered(classes))
    return replace(source, rows=conversion(rows), classes=tuple(classes), notes=notes, origin=Source.origin)


def _tensors_of(tree: Any, called: Called) -> Any:
    if isinstance(tree, Mapping):
        return {key: _tensors_of(part, Called(called.setting, f"`{key}`")) for key, part in tree.items()}
    if isinstance(tree, tuple):
        names = PAIR if len(tree) == 2 else [f"part {index}" for index in range(len(tree))]
        parts = [_tensors_of(part, Called(called.setting, name)) for part, name in zip(tree, names, strict=True)]
        return type(tree)(*parts) if hasattr(tree, "_fields") else tuple(parts)
    return to_tensor(tree, called)


def _renumbered(classes: Sequence[str]) -> tuple[str, ...]:
    if not classes or _are_numbers(classes):
        return ()
    shown = classes if len(classes) <= MAX_NAMED else (*classes[: MAX_NAMED - 1], "...", classes[-1])
    return (f"the classes {', '.join(shown)} are numbered from 0",)


def from_arrays(
    inputs: Any,
    targets: Any,
    *,
    name: str,
    kind: str = "auto",
    conversion: Conversion = STANDARD,
    like: Source | None = None,
    called: tuple[Called, Called] | None = None,
) -> Source:
    """Make a Source of arrays, tensors or lists of equal length, in the conversion's types. Raises: RunnerError.

    targets: (N,) classes, any integers or texts, numbered from 0; or floats, of which (N,) becomes (N, 1). like: the training
    split of another split; its classes and shapes hold.
    """
    xs, ys = called or (Called(f"data={name}", PAIR[0]), Called(f"data={name}", PAIR[1]))
    if like is not None:
        kind = "classification" if like.classes else "regression"
    known, dtype = (like.classes or None if like else None), conversion.dtype
    x, (y, classes) = at_once(
        lambda: to_inputs(inputs, xs, keep_integers=conversion.keeps_integers, dtype=dtype),
        lambda: to_targets(targets, ys, kind=kind, like=known, dtype=dtype),
    )
    if len(x) != len(y):
        problem = f"there are {len(x):,} rows in {xs.name}, and {len(y):,} in {ys.name}"
        raise xs.error(problem, "give as many targets as inputs")
    facts = facts_of(x, y, num_classes=len(classes) or None)
    for key, part in (("input_shape", xs), ("out_features", ys)):
        if like is not None and facts[key] != like.facts[key]:
            problem = f"the `{key}` of {part.name} is {facts[key]}, and the training split has {like.facts[key]}"
            raise part.error(problem, "use splits of the same shape")
    return Source(name, (x, y), facts, labels=y if classes else None, classes=classes)


def facts_of(inputs: Tensor, targets: Tensor, *, num_classes: int | None) -> dict[str, Any]:
    """Return sizes that a model is built from. targets: (N,) with num_classes, (N, ...) without."""
    shape = list(inputs.shape[1:])
    out_features = math.prod(targets.shape[1:]) if num_classes is None else num_classes
    facts = {"input_shape": shape, "in_features": math.prod(shape)}
    return {**facts, "num_classes": num_classes, "out_features": out_features}


def describe_dataset(
    dataset: Dataset[Any], *, name: str = "", setting: str, conversion: Conversion = STANDARD
) -> Source:
    """Make a Source of a Dataset, with the facts of its first row. Raises: RunnerError without a length, rows or a known form."""
    if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
        problem = f"`{type(dataset).__name__}` is a stream without a length, and rows are drawn by their index"
        raise RunnerError.of(setting, problem, "return a Dataset with `__len__` and `__getitem__`")
    if len(dataset) == 0:
        raise RunnerError.of(
            setting, f"`{type(dataset).__name__}` has no rows", "return a Dataset with at least one row"
        )
    return _describe(name, batch_of(dataset, [dataset[0]], setting=setting), dataset, conversion)


def _describe(name: str, before: Any, dataset: Any, conversion: Conversion) -> Source:
    """Return a Source of the dataset; facts that neither one of its batches nor its attributes have are absent."""
    batch, labels = conversion(before), labels_of(dataset)
    parts = tensors(batch)
    targets = tensors(batch[1]) if is_pair(batch) else parts[1:2]  # in ((x, z), y), z is an input
    whole = whole_of(dataset)
    classes = tuple(map(str, getattr(whole, "classes", None) or ()))
    facts: dict[str, Any] = {}
    if parts:
        shape = list(parts[0].shape[1:])
        facts = {"input_shape": shape, "in_features": math.prod(shape)}
    known = labels if whole is dataset else labels_of(whole)  # a part may lack the last class
    num_classes = len(classes) or (int(known.max()) + 1 if known is not None else None)
    if num_classes is not None:
        facts |= {"num_classes": num_classes, "out_features": num_classes}
    elif targets and targets[0].is_floating_point():
        facts |= {"num_classes": None, "out_features": math.prod(targets[0].shape[1:])}
    notes = changes(before, batch)
    return Source(name, dataset, facts, labels, origin=type(dataset).__name__, classes=classes, notes=notes)


def _from_loader(rows: OwnLoader, name: str, conversion: Conversion) -> Source:
    served = Served(rows, batch_size=1, device=torch.device("cpu"), seed=0, conversion=lambda batch: batch)
    with rows.unchanged():
        first = next(iter(served.epoch(0)))
    rows.rows_a_batch = num_rows(first)
    source = _describe(name, first, rows.dataset, conversion)
    note = "batches are as the DataLoader gives them; no validation or test split is cut from them"
    return replace(source, rows=rows, labels=None, notes=(note, *source.notes))


def _from_splits(found: Mapping[str, Any], name: str, setting: str, conversion: Conversion) -> Source:
    if unknown := [key for key in found if key not in ("train", *GIVEN)]:
        hits = nearest(str(unknown[0]), ("train", *GIVEN), cutoff=0.6) or ("train", *GIVEN)
        problem = f"the function returned splits called {', '.join(map(str, found))}; their names must be `train`, `val` and `test`"
        raise RunnerError.of(setting, problem, f"use {' or '.join(map(repr, hits))} instead of {unknown[0]!r}")
    if "train" not in found:
        problem = f"the function returned {', '.join(found)} and no training split"
        raise RunnerError.of(setting, problem, "return `{'train': (inputs, targets), ...}`, with the others next to it")
    train = as_source(found["train"], name=name, conversion=conversion)
    given = {split: _given(found[split], split, train, setting, conversion) for split in GIVEN if split in found}
    return replace(train, given=given)


def _given(found: Any, split: str, train: Source, setting: str, conversion: Conversion) -> Any:
    """Return the rows of another split. Next to a Dataset it must be one, too, as the user's classes have no other numbers."""
    arrays, is_dataset = _arrays_of(found), isinstance(train.rows, Dataset)
    if not conversion.has_columns and not isinstance(arrays, Source | Dataset | DataLoader):
        return _unconverted(arrays, split, setting, conversion, train).rows
    if isinstance(arrays, list | tuple) and len(arrays) == 2 and not is_dataset:
        integers = not tensors(train.rows)[0].is_floating_point()
        conversion = replace(conversion, keeps_integers=integers)
        inputs, targets = (Called(setting, f"{part} of {split}") for part in PAIR)
        return from_arrays(*arrays, name=split, conversion=conversion, like=train, called=(inputs, targets)).rows
    if isinstance(found, list | tuple) and len(found) == 2 and is_dataset and arrays is found:
        problem = f"{split} is (inputs, targets), and train is a `{train.origin}`"
        fix = f"return `TensorDataset(inputs, targets)` for {split}, of tensors like those of train"
        raise RunnerError.of(setting, problem, fix)
    if is_dataset and isinstance(found, TensorDataset):
        given = describe_dataset(found, name=split, setting=setting, conversion=conversion)
    else:
        given = as_source(found, name=split, conversion=conversion)
    if isinstance(given.rows, OwnLoader) and not given.rows.has_length:
        raise RunnerError(given.rows.no_length(f"{setting}, {split}", or_steps=False))
    if problem_of_classes := _other_classes(given, split, train, setting):
        raise RunnerError(problem_of_classes)
    return given.rows


def _other_classes(given: Source, split: str, train: Source, setting: str) -> Problem | None:
    """Return the error if classes have other numbers in the training split."""
    ours, theirs, num_classes = train.classes, given.classes, train.facts.get("num_classes")
    if num_classes is not None and given.labels is not None and int(given.labels.max()) >= num_classes:
        problem = f"{split} has class {int(given.labels.max())}, and the training split has {num_classes} classes"
        return Problem(setting, problem, "use the classes 0, 1, 2, ... of the training split, or add `classes` to it")
    has_none = not ours or given.facts.get("num_classes", len(ours)) is None
    if has_none or _are_numbers(ours) or (theirs and theirs == ours[: len(theirs)]):
        return None
    if isinstance(train.rows, Dataset) and (not theirs or _are_numbers(theirs)):
        return None
    problem = f"the classes of train are {', '.join(ours[:12])}, and those of {split} {', '.join(theirs[:12]) or 'are numbers'}"
    fix = f"use the `classes` of train in {split}, too, and their numbers (ImageFolder: an empty folder and `allow_empty=True`)"
    return Problem(setting, problem, fix)


def _are_numbers(classes: Sequence[str]) -> bool:
    return tuple(classes) == tuple(map(str, range(len(classes))))


def _checked(source: Source, setting: str) -> Source:
    if isinstance(source.rows, DataLoader | IterableDataset):
        return replace(source, rows=OwnLoader(source.rows, setting=setting))
    if isinstance(source.rows, Dataset):
        return source
    lengths = sorted({len(tensor) if tensor.dim() else 0 for tensor in tensors(source.rows)})
    problem = fix = ""
    if len(lengths) != 1 or lengths == [0]:
        problem = f"the tensors of the data have {' and '.join(f'{length:,}' for length in lengths) or 'no'} rows"
        fix = "return tensors with the same first dimension, 1 or more"
    elif source.labels is not None and len(source.labels) != lengths[0]:
        problem = f"the `Source` has {lengths[0]:,} rows and {len(source.labels):,} labels"
        fix = "return `Source(labels=...)` with a label for each row, or None"
    elif unknown := set(source.given) - set(GIVEN):
        problem = f"the `Source` has splits called {', '.join(sorted(unknown))}"
        fix = "return `Source(given={'val': ..., 'test': ...})`; the training split is rows"
    if problem:
        raise RunnerError.of(setting, problem, fix)
    return source


def _described(found: Any) -> str:
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {len(found)}"
    shape = getattr(found, "shape", None)
    return f"{type(found).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"

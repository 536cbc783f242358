"""Makes a Source of whatever a `_target_` under `data` returns: rows on the host, and the sizes that they tell."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from runner.data.loading.served import Served
from runner.data.map_style import STANDARD, Conversion, Rows, batch_of, changes, is_pair, labels_of, look_at, told_by
from runner.data.own_loader import OwnLoader
from runner.data.tables.values import are_texts, fall_together, to_inputs, to_targets, to_tensor, without_bools
from runner.device.placement import num_rows, tensors
from runner.errors import Problem, RunnerError, at_once, nearest

FORMS = (
    "(inputs, targets), {'train': (inputs, targets), 'test': ...}, a torch Dataset or DataLoader, a list of dicts, "
    "or a runner Source"
)
GIVEN = ("val", "test")
#: classes that a line names
MOST_NAMED = 4


@dataclass(frozen=True)
class Preprocessing:
    """What stands around the model, fitted on the training split: nodes of modules, which `build()` makes.

    They hold plain values alone (means, categories), so that the model can be made again where the data is not.
    """

    before: dict[str, Any] | None = None  # inputs as the source has them -> the model's inputs
    after: dict[str, Any] | None = None  # the model's outputs -> answers as the source has them
    keeps_inputs: bool = True  # whether the model's inputs are the source's still, so that they can be asked back of it


@dataclass(frozen=True)
class Source:
    """Everything a source has, before it is split. Lies on the host."""

    name: str
    rows: Any  # nested tensors that share their first dimension ((inputs, targets) for our tasks), or a Dataset
    facts: dict[str, Any]  # input_shape, in_features, out_features, num_classes (None for a regression)
    labels: Tensor | None = None  # (N,) int64: the splits keep their proportions
    given: Mapping[str, Any] = field(default_factory=dict)  # "val", "test": rows that come split already
    origin: str = "code"  # where it came from; shown in MLflow
    notes: tuple[str, ...] = ()  # what was chosen of it without being asked for, a line each: shown on the screen
    classes: tuple[str, ...] = ()  # the names of the classes, by index; () for a regression
    targets: tuple[str, ...] = ()  # the names of a regression's numbers, or of the labels of which a row has several
    around: Callable[[Any], Preprocessing] | None = None  # asked with the rows of the training split
    # finish(batch, draws) -> batch, on the device (runner.data.loading.batch_transform)
    finish: nn.Module | None = None
    reader: dict[str, Any] | None = None  # the node of what reads such inputs from a file: reader(path) -> inputs
    columns: tuple[str, ...] = ()  # the names of a row's inputs, one for each number; () where they have none
    place: Callable[[int], str] | None = None  # where a row stands, for a person: "people.csv, line 17"
    in_order: bool = False  # neighbouring rows tell of each other (a text's windows): splits are blocks, never drawn
    told: str = ""  # what its rows are, for the fingerprint, the same wherever they lie ("": they say it themselves)


def as_source(found: Any, *, name: str, conversion: Conversion = STANDARD) -> Source:
    """Make a Source, called `name`, of anything that a user-defined function may return.

    What the conversion changes is in `notes`. Without columns, nested tensors of any shapes and types are examples.

    Raises: RunnerError for another form, for lengths that differ, and, with columns, for values that are NaN or infinite.
    """
    asked = f"data={name}"
    if isinstance(found, Source):
        return _checked(_in_precision(replace(found, name=name), conversion), asked)
    if isinstance(found, Mapping) and {"train", *GIVEN} & set(found):
        return _from_splits(found, name, asked, conversion)
    if isinstance(found, DataLoader | IterableDataset):
        return _served(OwnLoader(found, asked=asked), name, conversion)
    if is_pair(found) and any(isinstance(part, Dataset | DataLoader) for part in found):
        problem = "a Dataset in a pair is neither inputs nor targets"
        raise RunnerError.of(asked, problem, "return `{'train': first, 'val': second}`")
    if isinstance(arrays := _arrays_of(found), Dataset):
        told = look_at(arrays, asked=asked, conversion=conversion)
        origin = type(found).__name__
        return Source(name, arrays, told.facts, told.labels, origin=origin, classes=told.classes, notes=told.notes)
    if not conversion.has_columns:
        return _as_they_are(arrays, name, asked, conversion)
    if isinstance(arrays, list | tuple) and len(arrays) == 2:
        inputs, targets = arrays
        made = from_arrays(
            inputs, targets, name=name, conversion=replace(conversion, keeps_integers=_are_indices(inputs))
        )
        return replace(made, notes=(*made.notes, *changes(arrays, made.rows), *_renumbered(made.classes)))
    problem = f"the function returned {_described(found)}, and data must be {FORMS}"
    raise RunnerError.of(asked, problem, "return one of these forms")


def _in_precision(source: Source, conversion: Conversion) -> Source:
    if conversion.dtype == torch.float32 or isinstance(source.rows, Dataset | DataLoader):
        return source
    cast = replace(conversion, has_columns=False)
    return replace(source, rows=cast(source.rows), given={name: cast(rows) for name, rows in source.given.items()})


def _are_indices(inputs: Any) -> bool:
    """Return whether a tensor has a type that embeddings take. Integers of arrays and lists are numbers of a table."""
    return isinstance(inputs, Tensor) and inputs.dtype in (torch.int32, torch.int64)


def _arrays_of(found: Any) -> Any:
    """Return the tensors of a pair in a TensorDataset, and a list of examples as a Dataset."""
    if isinstance(found, TensorDataset) and len(found.tensors) == 2:
        return tuple(found.tensors)
    is_rows = isinstance(found, list) and found and all(isinstance(row, Mapping | tuple) for row in found)
    return Rows(found) if is_rows and (len(found) != 2 or isinstance(found[0], Mapping)) else found


def _as_they_are(found: Any, name: str, asked: str, conversion: Conversion, train: Source | None = None) -> Source:
    """Nested tensors of any shapes and types. train: the training split, if this is another one; its classes hold."""
    classes: Sequence[str] = ()
    if isinstance(found, list):
        found = tuple(found) if len(found) == 2 else to_tensor(found, asked=asked, called="the data")
    if is_pair(found) and are_texts(found[1]):
        targets, classes = to_targets(found[1], asked=asked, like=train.classes if train else None)
        found = (found[0], targets)
    given = _tensors_of(found, asked, "the data")
    rows = _checked(Source(name, given, {}), asked).rows
    pair = TensorDataset(*rows) if is_pair(rows) and all(isinstance(part, Tensor) for part in rows) else None
    labels = labels_of(pair)
    told = told_by(given, pair, labels, conversion)
    if labels is not None and not classes and len(labels.unique()) == told.facts["num_classes"]:
        classes = [str(number) for number in range(told.facts["num_classes"])]
    notes = (*told.notes, *_renumbered(classes))
    return Source(name, conversion(given), told.facts, labels, classes=tuple(classes), notes=notes)


def _tensors_of(found: Any, asked: str, called: str) -> Any:
    if isinstance(found, Mapping):
        return {key: _tensors_of(part, asked, f"`{key}`") for key, part in found.items()}
    if isinstance(found, tuple):
        names = ("the inputs", "the targets") if len(found) == 2 else [f"part {index}" for index in range(len(found))]
        parts = [_tensors_of(part, asked, name) for part, name in zip(found, names, strict=True)]
        return type(found)(*parts) if hasattr(found, "_fields") else tuple(parts)
    return to_tensor(found, asked=asked, called=called)


def _renumbered(classes: Sequence[str]) -> tuple[str, ...]:
    """Describe which numbers stand for the classes, unless they were numbered from 0."""
    if not classes or _are_numbers(classes):
        return ()
    shown = classes if len(classes) <= MOST_NAMED else (*classes[: MOST_NAMED - 1], "...", classes[-1])
    return (f"the classes {', '.join(shown)} are numbered from 0",)


def from_arrays(
    inputs: Any,
    targets: Any,
    *,
    name: str,
    origin: str = "code",
    kind: str = "auto",
    conversion: Conversion = STANDARD,
    like: Source | None = None,
    asked: str = "",
    called: tuple[str, str] = ("the inputs", "the targets"),
) -> Source:
    """A Source from arrays, tensors or lists of equal length, in the conversion's types.

    targets: (N,) classes, any integers or texts, numbered from 0; or floats, (N,) made (N, 1). like: the training split of
    which this is another one; its classes and shapes hold. asked, called: how messages name what was asked for.
    """
    asked = asked or f"data={name}"
    if like is not None:
        kind = "classification" if like.classes else "regression"
    numbers = like.classes or None if like else None
    dtype = conversion.dtype
    x, (y, classes) = at_once(
        partial(to_inputs, inputs, asked=asked, called=called[0], keep_integers=conversion.keeps_integers, dtype=dtype),
        partial(to_targets, targets, asked=asked, called=called[1], kind=kind, like=numbers, dtype=dtype),
    )
    if len(x) != len(y):
        problem = f"there are {len(x):,} rows in {called[0]}, and {len(y):,} in {called[1]}"
        raise RunnerError.of(asked, problem, "give as many targets as inputs")
    facts = facts_of(x, y, num_classes=len(classes) or None)
    if like is not None and (error := _unlike(facts, like.facts, asked, called)):
        raise RunnerError(error)
    is_single = dtype == torch.float32
    notes = fall_together(inputs, called=called[0]) if is_single and not conversion.keeps_integers else ()
    notes += fall_together(targets, called=called[1]) if is_single and not classes else ()
    return Source(name, (x, y), facts, labels=y if classes else None, origin=origin, classes=classes, notes=notes)


def facts_of(inputs: Tensor, targets: Tensor, *, num_classes: int | None) -> dict[str, Any]:
    """Sizes that a model is built from. inputs: (N, ...). targets: (N,) with num_classes, (N, ...) without."""
    shape = list(inputs.shape[1:])
    out_features = math.prod(targets.shape[1:]) if num_classes is None else num_classes
    return {
        "input_shape": shape,
        "in_features": math.prod(shape),
        "num_classes": num_classes,
        "out_features": out_features,
    }


def _served(rows: OwnLoader, name: str, conversion: Conversion) -> Source:
    served = Served(rows, batch_size=1, device=torch.device("cpu"), seed=0, conversion=lambda batch: batch)
    with rows.looked_at():
        first = next(iter(served.epoch(0)))
    rows.rows_a_batch = num_rows(first)
    rows.has_integers = not tensors(first)[0].is_floating_point()
    told = told_by(first, rows.dataset, labels_of(rows.dataset), conversion)
    note = "batches are as the DataLoader gives them; no validation or test split is cut from them"
    origin = type(rows.dataset).__name__
    return Source(name, rows, told.facts, origin=origin, classes=told.classes, notes=(note, *told.notes))


def _from_splits(found: Mapping[str, Any], name: str, asked: str, conversion: Conversion) -> Source:
    if unknown := [key for key in found if key not in ("train", *GIVEN)]:
        hits = nearest(str(unknown[0]), ("train", *GIVEN), cutoff=0.6) or ("train", *GIVEN)
        problem = f"the function returned splits called {', '.join(map(str, found))}; their names must be `train`, `val` and `test`"
        raise RunnerError.of(asked, problem, f"use {' or '.join(map(repr, hits))} instead of {unknown[0]!r}")
    if "train" not in found:
        problem = f"the function returned {', '.join(found)} and no training split"
        raise RunnerError.of(asked, problem, "return `{'train': (inputs, targets), ...}`, with the others next to it")
    train = as_source(found["train"], name=name, conversion=conversion)
    given = {
        split: _given(_arrays_of(found[split]), split, train, asked, conversion) for split in GIVEN if split in found
    }
    return replace(train, given=given)


def _given(found: Any, split: str, train: Source, asked: str, conversion: Conversion) -> Any:
    if not conversion.has_columns and not isinstance(found, Source | Dataset | DataLoader):
        return _as_they_are(found, split, asked, conversion, train).rows
    if not isinstance(found, list | tuple) or len(found) != 2:
        given = as_source(found, name=split, conversion=conversion)
        if isinstance(given.rows, OwnLoader) and not given.rows.has_length:
            raise RunnerError(given.rows.no_length(f"{asked}, {split}", or_steps=False))
        if problem := _numbered_otherwise(given, split, train, asked):
            raise RunnerError(problem)
        return given.rows
    called = (f"the inputs of {split}", f"the targets of {split}")
    if isinstance(train.rows, Dataset):
        integers = _has_integers(train.rows, asked)
        conversion = replace(conversion, keeps_integers=integers)
        read = partial(from_arrays, name=split, conversion=conversion, asked=asked, called=called)
        return _beside_a_dataset(found, split, train, read)
    integers = not tensors(train.rows)[0].is_floating_point()
    conversion = replace(conversion, keeps_integers=integers)
    return from_arrays(*found, name=split, conversion=conversion, like=train, asked=asked, called=called).rows


def _has_integers(dataset: Any, asked: str) -> bool:
    if isinstance(dataset, OwnLoader):
        return dataset.has_integers
    parts = tensors(batch_of(dataset, [dataset[0]], asked=asked))
    return bool(parts) and not parts[0].is_floating_point()


def _beside_a_dataset(found: Sequence[Any], split: str, train: Source, read: Callable[..., Source]) -> Any:
    inputs, targets = found
    # of its sizes the targets' alone: rows that its collate_fn pads have no width of their own
    like = replace(train, facts={key: train.facts[key] for key in ("out_features",) if key in train.facts})
    if are_texts(targets):
        if not train.classes:
            problem = f"the targets of {split} are texts, and the training Dataset has no `classes` that number them"
            fix = f"add `classes` to the training Dataset, the names in the order of their numbers, or use numbers in {split}"
            raise RunnerError.of(f"data={train.name}", problem, fix)
        return read(inputs, targets, like=like).rows
    targets, num_classes = without_bools(targets), train.facts.get("num_classes")
    if "num_classes" in train.facts:  # None of a regression, and of labels of which a row has several
        return read(inputs, targets, like=replace(like, classes=tuple(map(str, range(num_classes or 0))))).rows
    source = read(inputs, targets)
    if not source.classes:
        return source.rows
    inputs, indices = source.rows
    return inputs, torch.tensor([int(name) for name in source.classes])[indices]


def _numbered_otherwise(given: Source, split: str, train: Source, asked: str) -> Problem | None:
    ours, theirs = train.classes, given.classes
    has_none = not ours or given.facts.get("num_classes", len(ours)) is None
    if has_none or _are_numbers(ours) or (theirs and theirs == ours[: len(theirs)]):
        return None
    if theirs and not _are_numbers(theirs):
        problem = f"the classes of train are {', '.join(ours[:12])}, and those of {split} {', '.join(theirs[:12])}"
        fix = f"use the `classes` of train in {split}, too, and their numbers (ImageFolder: an empty folder and `allow_empty=True`)"
        return Problem(asked, problem, fix)
    if isinstance(train.rows, Dataset):
        return None
    problem = f"the classes of train ({', '.join(ours[:12])}) are numbered from 0, and {split} has its own numbers"
    return Problem(
        asked, problem, f"use targets 0, 1, 2, ... in train, as {split} has them, or (inputs, targets) in {split}"
    )


def _are_numbers(classes: Sequence[str]) -> bool:
    return tuple(classes) == tuple(map(str, range(len(classes))))


def _checked(source: Source, asked: str) -> Source:
    if isinstance(source.rows, DataLoader | IterableDataset):
        return replace(source, rows=OwnLoader(source.rows, asked=asked))
    if isinstance(source.rows, Dataset):
        return source
    lengths = sorted({len(tensor) if tensor.dim() else 0 for tensor in tensors(source.rows)})
    if len(lengths) != 1 or lengths == [0]:
        problem = f"the tensors of the data have {' and '.join(f'{length:,}' for length in lengths) or 'no'} rows"
        raise RunnerError.of(asked, problem, "return tensors with the same first dimension, 1 or more")
    if source.labels is not None and len(source.labels) != num_rows(source.rows):
        problem = f"the `Source` has {num_rows(source.rows):,} rows and {len(source.labels):,} labels"
        raise RunnerError.of(asked, problem, "return `Source(labels=...)` with a label for each row, or None")
    if unknown := set(source.given) - set(GIVEN):
        problem = f"the `Source` has splits called {', '.join(sorted(unknown))}"
        raise RunnerError.of(
            asked, problem, "return `Source(given={'val': ..., 'test': ...})`; the training split is rows"
        )
    return source


def _unlike(facts: dict[str, Any], train: dict[str, Any], asked: str, called: tuple[str, str]) -> Problem | None:
    for key, name in (("input_shape", called[0]), ("out_features", called[1])):
        if key in train and facts[key] != train[key]:
            problem = f"the `{key}` of {name} is {facts[key]}, and the training split has {train[key]}"
            return Problem(asked, problem, "use splits of the same shape")
    return None


def _described(found: Any) -> str:
    if isinstance(found, list | tuple):
        return f"a {type(found).__name__} of {len(found)}"
    shape = getattr(found, "shape", None)
    return f"{type(found).__name__}{'' if shape is None else f' of shape {tuple(shape)}'}"

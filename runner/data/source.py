"""Whatever a `_target_` under `data` returns goes in; a Source comes out: tensors on the host, and what they tell of sizes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from runner.errors import Fault, RunnerError
from runner.placement import map_tensors, num_rows, tensors

FORMS = "(inputs, targets), {'train': (inputs, targets), 'test': ...}, a map-style torch Dataset or a runner Source"


@dataclass(frozen=True)
class Source:
    """Everything a source has, before it is split. Lies on the host."""

    name: str
    rows: (
        Any  # nested tensors that share their first dimension ((inputs, targets) for our tasks), or a map-style Dataset
    )
    facts: dict[str, Any]  # input_shape, in_features, out_features, num_classes
    labels: Tensor | None = None  # (N,) int64: the splits keep their proportions
    given: Mapping[str, Any] = field(default_factory=dict)  # "val", "test": rows that come split already
    origin: str = "code"  # where it came from; shown in MLflow
    classes: tuple[str, ...] = ()  # names of the classes, by index; () when they are numbers


def as_source(found: Any, *, name: str) -> Source:
    """A Source from anything that a person's function may return.

    Raises: RunnerError for another form, for lengths that differ, and for values that are NaN or infinite.
    """
    if isinstance(found, Source):
        return replace(found, name=name)
    if isinstance(found, Dataset):
        return _from_dataset(found, name)
    if isinstance(found, Mapping) and "train" in found:
        train = as_source(found["train"], name=name)
        given = {split: _rows(found[split], name, train.classes) for split in ("val", "test") if split in found}
        return replace(train, given=given)
    if isinstance(found, list | tuple) and len(found) == 2:
        return from_arrays(found[0], found[1], name=name)
    so = f"it returned {type(found).__name__}, and data is {FORMS}"
    raise RunnerError(Fault(f"data={name}", so, "one of these forms at the end of your function"))


def from_arrays(inputs: Any, targets: Any, *, name: str, origin: str = "code", kind: str = "auto") -> Source:
    """A Source from arrays or tensors of equal length.

    inputs: (N, ...), made float32. targets: (N,) classes of any integers or texts, made 0..C-1; or floats, made (N, T) float32.
    kind: auto (floats are regression, all else classes), classification or regression.
    """
    x = _floats(inputs, name, "inputs")
    y, classes = _targets(targets, name, kind)
    if len(x) != len(y):
        raise RunnerError(
            Fault(f"data={name}", f"{len(x):,} inputs and {len(y):,} targets", "as many targets as inputs")
        )
    if len(x) == 0:
        raise RunnerError(Fault(f"data={name}", "it has no rows", "a file or a function with rows in it"))
    is_classes = y.dtype == torch.int64
    num_classes = (len(classes) or int(y.max()) + 1) if is_classes else None
    facts = {
        "input_shape": list(x.shape[1:]),
        "in_features": math.prod(x.shape[1:]),
        "num_classes": num_classes,
        "out_features": num_classes if is_classes else y.shape[1],
    }
    names = tuple(classes) if any(item != str(index) for index, item in enumerate(classes)) else ()
    return Source(name, (x, y), facts, labels=y if is_classes else None, origin=origin, classes=names)


def _rows(found: Any, name: str, classes: tuple[str, ...]) -> Any:
    """A given split, its classes numbered as the training split's."""
    other = as_source(found, name=name)
    if other.labels is None or other.classes == classes:
        return other.rows
    own = other.classes or tuple(map(str, range(other.facts["num_classes"])))
    known = {label: index for index, label in enumerate(classes)}
    if unknown := [label for label in own if label not in known]:
        so = f"classes {', '.join(unknown)} are in another split and not in train"
        raise RunnerError(Fault(f"data={name}", so, "the same classes in each split"))
    inputs, targets = other.rows
    return inputs, torch.tensor([known[label] for label in own])[targets]


def _from_dataset(dataset: Dataset[Any], name: str) -> Source:
    if not hasattr(dataset, "__len__"):
        so = "it is an iterable Dataset, without a length; this version takes map-style ones (__len__ and __getitem__)"
        raise RunnerError(Fault(f"data={name}", so, "a Dataset with __len__ and __getitem__"))
    from torch.utils.data import default_collate

    first = default_collate([dataset[0]])
    shapes = [tensor for tensor in tensors(first)]
    facts: dict[str, Any] = {}
    if shapes:
        facts = {"input_shape": list(shapes[0].shape[1:]), "in_features": math.prod(shapes[0].shape[1:])}
    classes = getattr(dataset, "classes", None)
    labels = getattr(dataset, "targets", None)
    labels = torch.as_tensor(labels) if labels is not None and len(labels) == len(dataset) else None
    if labels is not None and (labels.is_floating_point() or labels.dim() != 1):
        labels = None
    count = len(classes) if classes is not None else int(labels.max()) + 1 if labels is not None else None
    if count is None and len(shapes) > 1 and shapes[1].is_floating_point():
        facts |= {"out_features": math.prod(shapes[1].shape[1:]), "num_classes": None}
    elif count is not None:
        facts |= {"out_features": count, "num_classes": count}
    return Source(
        name, dataset, facts, labels=labels, origin=type(dataset).__name__, classes=tuple(map(str, classes or ()))
    )


def _floats(values: Any, name: str, what: str) -> Tensor:
    """(N, ...) float32, all finite."""
    if isinstance(values, Mapping | list) and any(isinstance(item, Tensor) for item in tensors(values)):
        rows = {num_rows(tensor) for tensor in tensors(values)}
        so = f"its {what} are {type(values).__name__} with {len(rows)} lengths; one array is needed"
        raise RunnerError(Fault(f"data={name}", so, "a Source with nested rows, for inputs of several tensors"))
    try:
        tensor = torch.as_tensor(np.asarray(values)) if not isinstance(values, Tensor) else values
        tensor = tensor.detach().to("cpu", torch.float32)
    except (TypeError, ValueError, RuntimeError) as error:
        so = f"its {what} can't be numbers: {str(error).splitlines()[0]}"
        raise RunnerError(Fault(f"data={name}", so, f"{what} as an array of numbers")) from None
    if tensor.dim() == 0:
        raise RunnerError(Fault(f"data={name}", f"its {what} are one number", f"{what} as an array with a row each"))
    bad = ~torch.isfinite(tensor)
    if bad.any():
        rows = bad.flatten(1).any(1) if tensor.dim() > 1 else bad
        first = int(rows.nonzero()[0])
        so = f"{int(bad.sum()):,} of its {what} are NaN or infinite, in {int(rows.sum()):,} rows (the first is row {first})"
        raise RunnerError(Fault(f"data={name}", so, "the same data with those rows mended or left out"))
    return tensor.contiguous()


def _targets(values: Any, name: str, kind: str) -> tuple[Tensor, list[str]]:
    """(N,) int64 and the classes' names, or (N, T) float32 and no names."""
    array = values.detach().cpu().numpy() if isinstance(values, Tensor) else np.asarray(values)
    if kind not in ("auto", "classification", "regression"):
        choices = "data.kind=auto, data.kind=classification or data.kind=regression"
        raise RunnerError(Fault(f"data.kind={kind}", "targets are classes or numbers", choices))
    is_regression = kind == "regression" or (kind == "auto" and array.dtype.kind == "f")
    if is_regression:
        tensor = _floats(array, name, "targets")
        return tensor.reshape(len(tensor), -1), []
    if array.dtype.kind not in "iubUSf":
        so = f"its targets are {array.dtype}; classes are whole numbers or texts"
        raise RunnerError(Fault(f"data={name}", so, "targets as an array of integers, texts or floats"))
    flat = array.reshape(len(array), -1) if array.ndim else array.reshape(1, 1)
    if flat.shape[1] != 1:
        so = f"its targets have {flat.shape[1]} columns; a class is one value a row"
        raise RunnerError(Fault(f"data={name}", so, "one column of classes, or data.kind=regression"))
    classes, indices = np.unique(flat[:, 0], return_inverse=True)
    names = [item.decode() if isinstance(item, bytes) else str(item) for item in classes.tolist()]
    return torch.from_numpy(indices.astype(np.int64)), names


def copy_rows(rows: Any, indices: Tensor) -> Any:
    """The rows at `indices`, (K,) int64, of nested tensors; new tensors."""
    return map_tensors(rows, lambda tensor: tensor[indices])

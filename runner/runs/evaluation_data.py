"""Read the rows that `evaluate` measures, by split: those of the run, or other data with the run's classes."""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from omegaconf import DictConfig, open_dict
from torch import Tensor

from runner.config import validate
from runner.config.identity import key_of
from runner.config.instantiate import build, locate
from runner.data.loading.loaders import Batches
from runner.data.loading.own_loader import OwnLoader
from runner.data.source import Source, as_source
from runner.data.split import fingerprint, length, split
from runner.errors import Problem, RunnerError, refuse
from runner.experiment import build_data
from runner.models.card import Card

#: keys of `data` that leave the rows as they are
OF_READING = ("data.residency", "data.num_workers", "data.name")
#: the same for built-in data sets only: where the rows are, and how training rows are changed
OF_OWN_READING = ("data.in_memory", "data.decode", "data.augment")
OF_CUTTING = ("data.limit", "data.val_fraction", "data.test_fraction", "data.fold", "data.num_folds")
OF_TRAINING = "data.sampler"
#: files with further rows of the run, which don't belong to another data.path
OF_OWN_ROWS = ("val_path", "test_path")


@dataclass(frozen=True)
class Measured:
    """The rows to measure."""

    source: Source
    rows: dict[str, Any]  # by split
    is_own: bool  # the splits of the run
    how: str  # how the splits were made, for the user
    fingerprint: str
    order: Tensor | None  # (C,) int64: the run's index of each class or label of this data; None: the same

    @property
    def sizes(self) -> dict[str, int]:
        return {name: length(rows) for name, rows in self.rows.items()}


def is_other(overrides: Sequence[str], *, target: str) -> bool:
    """Return whether the overrides name other data than the run's. target: data._target_, with the overrides.

    Raises:
        RunnerError: If they change how the run's data is split.
    """
    keys = {key_of(word) for word in overrides}
    if any(key.startswith(OF_TRAINING) for key in keys):
        problem = "an evaluation measures every row once, so this setting has no effect"
        raise RunnerError.of(OF_TRAINING, problem, f"remove `{OF_TRAINING}`")
    as_it_is = OF_READING + (OF_OWN_READING if target.startswith("runner.data.") else ())
    of_data = {key for key in keys if key == "data" or key.startswith("data.")}
    of_data = {key for key in of_data if ".".join(key.split(".")[:2]) not in as_it_is}
    cuts = sorted(of_data & set(OF_CUTTING))
    if of_data and of_data == set(cuts):
        problem = "the run's data would be split differently, so training rows would be measured"
        raise RunnerError(
            *(Problem(key, problem, f"remove `{key}`, or name other data with `data.path=...`") for key in cuts)
        )
    if fractions := [key for key in cuts if key != "data.limit"]:
        problem = "other data is measured completely, unless it has its own splits"
        raise RunnerError(*(Problem(key, problem, f"remove `{key}`") for key in fractions))
    return bool(of_data)


def leave_own_rows(cfg: DictConfig, overrides: Sequence[str]) -> None:
    """Remove settings that apply only to the run's rows from a configuration that names other rows.

    Raises:
        RunnerError: If the rows would get the targets of the run's rows.
    """
    typed = {key_of(word) for word in overrides}
    with open_dict(cfg):
        if cfg.data.get("limit") is not None and "data.limit" not in typed:
            cfg.data.limit = None  # other data is measured completely
        if "data.path" not in typed or not str(cfg.data._target_).startswith("runner.data."):
            return
        for name in OF_OWN_ROWS:
            if cfg.data.get(name) is not None and f"data.{name}" not in typed:
                cfg.data[name] = None
    if (targets := cfg.data.get("targets_path")) is not None and "data.targets_path" not in typed:
        problem = f"the run's targets are in another file, `{targets}`, which belongs to its own rows"
        fix = "use `data.targets_path=FILE` for these rows, or `data.targets_path=null` if the targets are in the same file"
        raise RunnerError.of(f"data.path={cfg.data.path}", problem, fix)


def measured(cfg: DictConfig, card: Card, *, other: bool) -> Measured:
    """Read the data. Raises: RunnerError for data that the run's model does not accept."""
    shared = validate.shared_data_settings(cfg)
    node = build_data.in_precision(validate.target_node(cfg, "data", resolve=True), cfg)
    found, conversion = _found(node, card if other else None), build_data.conversion_of(cfg)
    source = as_source(found, name=shared["name"] or card.data, conversion=conversion)
    order = None
    if other:
        rows, how = _whole(source, shared["limit"], cfg.seed)
        order = _fitting(source, card, asked=f"data={source.name}")
    else:
        splits = split(source, seed=cfg.seed, **validate.how_to_cut(cfg))
        found = {"val": splits.val, "test": splits.test}
        rows, how = {name: part for name, part in found.items() if part is not None}, "the splits of the run"
        if not rows:
            problem = "the run trained on all its data and has no val or test split"
            raise RunnerError.of("evaluate", problem, "name other data: `evaluate RUN data.path=...`")
    return Measured(source, rows, not other, how, fingerprint(source), order)


def batches_of(found: Measured, name: str, cfg: DictConfig, device: torch.device) -> Batches:
    """Return the batches of a split, in order, as at the end of an epoch."""
    return build_data.batches_of(found.rows[name], found.source, cfg, device)[0]


def in_order(batches: Iterator[Any], order: Tensor | None, device: torch.device, *, are_classes: bool) -> Iterator[Any]:
    """Return the batches with the class indices, or the order of target columns, of the run."""
    if order is None:
        return batches
    there = order.to(device)

    def changed(batch: Any) -> Any:
        targets = there[batch[-1]] if are_classes else batch[-1].index_select(1, there)
        return type(batch)([*batch[:-1], targets])

    return map(changed, batches)


def _found(node: dict[str, Any], card: Card | None) -> Any:
    if card is None or card.reader is None:
        return build(node, key="data")
    if "like" not in inspect.signature(locate(str(node["_target_"]))).parameters:
        return build(node, key="data")
    make = build({**node, "_partial_": True}, key="data")  # `like` is a node, and must not be built
    try:
        return make(like=card.reader)
    except RunnerError:
        raise
    except Exception as error:
        problem = f"`{node['_target_']}` failed with {type(error).__name__}: {error}"
        fix = "use other values for its arguments"
        raise RunnerError.of(f"data._target_={node['_target_']}", problem, fix) from error


def _whole(source: Source, limit: int | None, seed: int) -> tuple[dict[str, Any], str]:
    if source.given:
        if limit is not None:
            problem = f"the data has its own splits, {' and '.join(source.given)}, which are measured completely"
            raise RunnerError.of(f"data.limit={limit}", problem, "remove `data.limit`")
        return dict(source.given), f"its own {' and '.join(source.given)}; what it has to train on is left out"
    if isinstance(source.rows, OwnLoader) and not source.rows.has_length:
        raise RunnerError(source.rows.no_length(f"data={source.name}", or_steps=False))
    rows = split(source, val_fraction=0.0, test_fraction=0.0, limit=limit, seed=seed).train
    return {"test": rows}, "all of it, as one split"


def _fitting(source: Source, card: Card, *, asked: str) -> Tensor | None:
    problems = []
    for key, name in (
        ("input_shape", "rows of shape"),
        ("vocab_size", "tokens of"),
        ("context_length", "tokens a row:"),
    ):
        then, now = card.facts.get(key), source.facts.get(key)
        if then is not None and now is not None and _plain(then) != _plain(now):
            problem = f"the run's model takes {name} {then}, and this data has {now}"
            problems.append(Problem(asked, problem, f"use data like `{card.data}`, which the run trained on"))
    error, order = _numbered(source, card, asked)
    if error is not None:
        problems.append(error)
    refuse(problems)
    return order


def _numbered(source: Source, card: Card, asked: str) -> tuple[Problem | None, Tensor | None]:
    are_classes, were_classes = source.facts.get("num_classes") is not None, card.facts.get("num_classes") is not None
    if are_classes != were_classes:
        problem = f"the run predicts {_what(were_classes)}, and this data has {_what(are_classes)}"
        return Problem(
            asked, problem, f"use `data.kind={'classification' if were_classes else 'regression'}` for files of arrays"
        ), None
    names, known, what = (
        (source.classes, card.classes, "classes") if were_classes else (source.targets, card.targets, "targets")
    )
    if not names or not known:  # without names only their number is compared
        then, now = card.facts.get("out_features"), source.facts.get("out_features")
        too_many = isinstance(then, int) and isinstance(now, int) and (now > then if were_classes else now != then)
        problem = f"the run predicts {then} {what}, and this data has {now}"
        return (Problem(asked, problem, f"use data with {then} {what}") if too_many else None), None
    unknown = [name for name in names if name not in known]
    missing = [] if were_classes else [name for name in known if name not in names]
    if unknown or missing:
        listed = ", ".join([*unknown[:5], *(f"no {name}" for name in missing[:5])])
        problem = f"the run's {what} are {', '.join(known[:12])}, and this data has {listed}"
        return Problem(asked, problem, f"use rows of the run's {what} only, with the same names"), None
    if names == known[: len(names)] and (were_classes or len(names) == len(known)):
        return None, None
    numbers = [known.index(name) for name in names] if were_classes else [names.index(name) for name in known]
    return None, torch.tensor(numbers)


def _what(are_classes: bool) -> str:
    return "classes" if are_classes else "numbers"


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, list | tuple) else value

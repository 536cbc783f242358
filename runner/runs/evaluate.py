"""`evaluate`: measures the best weights of a run, or a checkpoint, on the run's splits or on other data."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from omegaconf import DictConfig, OmegaConf, open_dict
from torch import Tensor

from runner.command import Arguments
from runner.config import validate
from runner.config.identity import key_of
from runner.config.instantiate import build, locate
from runner.config.run_files import write_whole
from runner.data.loading.own_loader import OwnLoader
from runner.data.source import Source, as_source
from runner.data.split import fingerprint, length, split
from runner.device import layers, probe
from runner.errors import Problem, RunnerError, at_once, refuse
from runner.experiment import build_data
from runner.experiment.check import check
from runner.experiment.directory import BEST, Run
from runner.experiment.terminal import aligned, readable, say, short
from runner.models.card import Card
from runner.runs.find import find_trained
from runner.runs.load import Trained, computing, configuration_of, open_run
from runner.tracking.journal_reader import read_measured
from runner.training.evaluate import evaluate as measure

OWN, OTHERS = "evaluation.json", "evaluations"
#: keys of `data` that leave the rows as they are
READING_KEYS = ("data.residency", "data.num_workers", "data.name")
#: the same for built-in data sets only: where the rows are, and how training rows are changed
READER_ARGUMENTS = ("data.in_memory", "data.decode", "data.augment")
SPLIT_KEYS = ("data.limit", "data.val_fraction", "data.test_fraction", "data.fold", "data.num_folds")
TRAINING_KEY = "data.sampler"
#: files with further rows of the run, which don't belong to another data.path
PATH_ARGUMENTS = ("val_path", "test_path")


@dataclass(frozen=True)
class Measured:
    """The rows to measure."""

    source: Source
    rows: dict[str, Any]  # by split
    is_own: bool  # the splits of the run
    how: str  # how the splits were made, for the user
    fingerprint: str
    order: Tensor | None  # (C,) int64: the run's index of each class, or the order of its targets; None: the same

    @property
    def sizes(self) -> dict[str, int]:
        return {name: length(rows) for name, rows in self.rows.items()}


def evaluate(arguments: Arguments) -> dict[str, Any]:
    """Measure a run or a checkpoint, print a table, and write evaluation.json, or evaluations/NAME.json for other data.

    Returns:
        The content of the file.

    Raises:
        RunnerError: For a run without a model, data that the model does not accept, or a missing device.
    """
    wanted, overrides = arguments.run, arguments.overrides
    run, _ = at_once(partial(find_trained, wanted, verb="evaluate"), partial(computing, overrides))
    cfg = configuration_of(run.folder, overrides)
    other = is_other(overrides, target=str(OmegaConf.select(cfg, "data._target_")))
    if other:
        leave_own_rows(cfg, overrides)
    with open_dict(cfg):
        cfg.train.compile = cfg.train.cuda_graph = False
        if not any(key_of(word) == "device" for word in overrides):
            cfg.device = "auto"  # this machine may not have the run's device
    choice = check(cfg, probe())
    device = torch.device(choice.here)
    build_data.set_switches(cfg, device)
    trained = open_run(run, precision=cfg.train.precision, device=choice)
    settings = cfg.backends.get(device.type, {})
    layers.lay_out(trained.model, device=device, precision=trained.precision.name, settings=settings)  # as in the run
    found = _measured(cfg, trained.card, other=other)
    report = _report(trained, found, _values(trained, found, cfg))
    _write(run, report)
    _show(trained, report)
    return report


def _values(trained: Trained, found: Measured, cfg: DictConfig) -> dict[str, float]:
    values: dict[str, float] = {}
    names = trained.card.classes or trained.card.targets
    for split_name, rows in found.rows.items():
        batches, _ = build_data.batches_of(rows, found.source, cfg, trained.device)
        try:
            ordered = _in_order(batches.epoch(0), trained, found.order)
            reached = measure(trained.model, trained.task, ordered, precision=trained.precision, labels=names)
        finally:
            batches.close()
        values |= {f"{split_name}/{key}": value for key, value in reached.items()}
    return values


def _in_order(batches: Iterator[Any], trained: Trained, order: Tensor | None) -> Iterator[Any]:
    """Return the batches with the class indices, or the order of target columns, of the run."""
    if order is None:
        return batches
    there, are_classes = order.to(trained.device), trained.card.facts.get("num_classes") is not None

    def changed(batch: Any) -> Any:
        targets = there[batch[-1]] if are_classes else batch[-1].index_select(1, there)
        return type(batch)([*batch[:-1], targets])

    return map(changed, batches)


def _report(trained: Trained, found: Measured, values: Mapping[str, float]) -> dict[str, Any]:
    run = trained.run
    then = _then(run, trained.step) if found.is_own else {}
    has_changed = found.is_own and run.has_other_data(found.fingerprint)
    changed = ["the data changed since the run trained: its fingerprint differs"] * has_changed
    return {
        "run": short(run.folder),
        "run_id": run.ack.run_id,
        "step": trained.step,
        "data": found.source.name,
        "origin": str(found.source.origin),
        "is_own_data": found.is_own,
        "measured": found.how,
        "fingerprint": found.fingerprint,
        "rows": found.sizes,
        "device": trained.choice.device,
        "device_reason": trained.choice.reason,
        "precision": trained.precision.name,
        "metrics": dict(values),
        "in_the_run": {name: then[name] for name in values if name in then},
        "notes": [*trained.notes, *changed],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _then(run: Run, step: int) -> dict[str, float]:
    found = read_measured(run.folder, step)
    return {name: value for name, (value, _, _) in found.items() if name.startswith("val/") or run.weights == BEST}


def _write(run: Run, report: dict[str, Any]) -> None:
    folder, names = run.folder, [] if run.weights == BEST else [Path(run.weights).stem]
    if not report["is_own_data"]:
        name = "".join(letter if letter.isalnum() or letter in "-_." else "_" for letter in report["data"])
        names += [name, report["fingerprint"][:8]]
    file = folder / OTHERS / f"{'-'.join(names)}.json" if names else folder / OWN
    report["written"] = short(file)
    try:
        write_whole(file, json.dumps(report, indent=2) + "\n")
    except OSError as error:
        problem = f"the results can't be written: {error.strerror} ({short(file)})"
        fix = "copy the run directory to a place where you can write"
        raise RunnerError.of(f"evaluate {short(folder)}", problem, fix) from None


def _show(trained: Trained, report: dict[str, Any]) -> None:
    sizes = ", ".join(f"{count:,} {name}" for name, count in report["rows"].items())
    say(f"run     {trained.title}")
    say(f"data    {report['data']}, rows: {sizes} ({report['measured']})")
    say(f"device  {report['device']} ({report['device_reason']}), {report['precision']}")
    for note in report["notes"]:
        say(f"note    {note}")
    then = report["in_the_run"]
    columns = [(split, report["metrics"]) for split in report["rows"]]
    columns = [
        each for split, now in columns for each in ((split, now), (f"{split}, in the run", then))[: 1 + bool(then)]
    ]
    names = dict.fromkeys(name.partition("/")[2] for name in report["metrics"])
    rows = [["", *(title for title, _ in columns)]]
    for name in names:
        cells = (values.get(f"{title.partition(',')[0]}/{name}") for title, values in columns)
        rows.append([name, *("" if value is None else readable(value) for value in cells)])
    for line in aligned(rows, right=True):
        say(line)
    say(f"written {report['written']}")


def is_other(overrides: Sequence[str], *, target: str) -> bool:
    """Return whether the overrides name other data than the run's. target: data._target_, with the overrides.

    Raises:
        RunnerError: If they change how the run's data is split.
    """
    keys = {key_of(word) for word in overrides}
    if any(key.startswith(TRAINING_KEY) for key in keys):
        problem = "an evaluation measures every row once, so this setting has no effect"
        raise RunnerError.of(TRAINING_KEY, problem, f"remove `{TRAINING_KEY}`")
    as_it_is = READING_KEYS + (READER_ARGUMENTS if target.startswith("runner.data.") else ())
    of_data = {key for key in keys if key == "data" or key.startswith("data.")}
    of_data = {key for key in of_data if ".".join(key.split(".")[:2]) not in as_it_is}
    cuts = sorted(of_data & set(SPLIT_KEYS))
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
        for name in PATH_ARGUMENTS:
            if cfg.data.get(name) is not None and f"data.{name}" not in typed:
                cfg.data[name] = None
    if (targets := cfg.data.get("targets_path")) is not None and "data.targets_path" not in typed:
        problem = f"the run's targets are in another file, `{targets}`, which belongs to its own rows"
        fix = "use `data.targets_path=FILE` for these rows, or `data.targets_path=null` if the targets are in the same file"
        raise RunnerError.of(f"data.path={cfg.data.path}", problem, fix)


def _measured(cfg: DictConfig, card: Card, *, other: bool) -> Measured:
    """Read the data. Raises: RunnerError for data that the run's model does not accept."""
    shared = validate.shared_data_settings(cfg)
    node = build_data.in_precision(validate.target_node(cfg, "data", resolve=True), cfg)
    found, conversion = _found(node, card if other else None), build_data.conversion_of(cfg)
    source = as_source(found, name=shared["name"] or card.data, conversion=conversion)
    order = None
    if other:
        rows, how = _whole(source, shared["limit"], cfg.seed)
        asked = f"data={source.name}"
        _, order = at_once(partial(_check_facts, source, card, asked), partial(_order, source, card, asked))
    else:
        splits = split(source, seed=cfg.seed, **validate.how_to_cut(cfg))
        found = {"val": splits.val, "test": splits.test}
        rows, how = {name: part for name, part in found.items() if part is not None}, "the splits of the run"
        if not rows:
            problem = "the run trained on all its data and has no val or test split"
            raise RunnerError.of("evaluate", problem, "name other data: `evaluate RUN data.path=...`")
    return Measured(source, rows, not other, how, fingerprint(source), order)


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


def _check_facts(source: Source, card: Card, asked: str) -> None:
    names = {"input_shape": "rows of shape", "vocab_size": "tokens of", "context_length": "tokens a row:"}
    problems = []
    for key, name in names.items():
        then, now = card.facts.get(key), source.facts.get(key)
        if then is not None and now is not None and not np.array_equal(then, now):
            problem = f"the run's model takes {name} {then}, and this data has {now}"
            problems.append(Problem(asked, problem, f"use data like `{card.data}`, which the run trained on"))
    refuse(problems)


def _order(source: Source, card: Card, asked: str) -> Tensor | None:
    are_classes, were_classes = (each.facts.get("num_classes") is not None for each in (source, card))
    if are_classes != were_classes:
        then, now = ("classes", "numbers") if were_classes else ("numbers", "classes")
        fix = f"use `data.kind={'classification' if were_classes else 'regression'}` for files of arrays"
        raise RunnerError.of(asked, f"the run predicts {then}, and this data has {now}", fix)
    what, names, known = ("classes", source.classes, card.classes)
    if not were_classes:
        what, names, known = ("targets", source.targets, card.targets)
    if not names or not known:  # without names only their number is compared
        num, num_now = card.facts.get("out_features"), source.facts.get("out_features")
        if (
            isinstance(num, int)
            and isinstance(num_now, int)
            and (num_now > num or (num_now < num and not were_classes))
        ):
            problem = f"the run predicts {num} {what}, and this data has {num_now}"
            raise RunnerError.of(asked, problem, f"use data with {num} {what}")
        return None
    unknown = [name for name in names if name not in known]
    missing = [] if were_classes else [name for name in known if name not in names]
    if unknown or missing:
        listed = ", ".join([*unknown[:5], *(f"no {name}" for name in missing[:5])])
        problem = f"the run's {what} are {', '.join(known[:12])}, and this data has {listed}"
        raise RunnerError.of(asked, problem, f"use rows of the run's {what} only, with the same names")
    order = [known.index(name) for name in names] if were_classes else [names.index(name) for name in known]
    return None if order == list(range(len(order))) else torch.tensor(order)

"""`evaluate`: measures the best weights of a run, or a checkpoint, on the run's splits or on other data."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.command import Arguments
from runner.config.identity import key_of
from runner.config.run_files import write_whole
from runner.device import layers, probe
from runner.errors import RunnerError, at_once, first_line, without_password
from runner.experiment.build_data import set_switches
from runner.experiment.check import check
from runner.experiment.terminal import readable, say, short
from runner.runs.evaluation_data import Measured, batches_of, in_order, is_other, leave_own_rows, measured
from runner.runs.load import BEST, Trained, computing, configuration_of, find_run, open_run
from runner.tracking.ack import read_ack
from runner.tracking.journal_reader import read_events, read_measured
from runner.training.evaluate import evaluate as measure

OWN, OTHERS = "evaluation.json", "evaluations"


def evaluate(arguments: Arguments) -> dict[str, Any]:
    """Measure a run or a checkpoint, print a table, and write evaluation.json, or evaluations/NAME.json for other data.

    Returns:
        The content of the file.

    Raises:
        RunnerError: For a run without a model, data that the model does not accept, or a missing device.
    """
    wanted, overrides = arguments.run, arguments.overrides
    at_once(partial(find_run, wanted, verb="evaluate"), partial(computing, overrides))
    folder, weights = find_run(wanted, verb="evaluate")
    cfg = configuration_of(folder, overrides)
    other = is_other(overrides, target=str(OmegaConf.select(cfg, "data._target_")))
    if other:
        leave_own_rows(cfg, overrides)
    if not any(key_of(word) == "device" for word in overrides):
        with open_dict(cfg):
            cfg.device = "auto"  # this machine may not have the run's device
    _leave_steps(cfg)
    choice = check(cfg, probe())
    device = torch.device(choice.here)
    set_switches(cfg, device)
    trained = open_run((folder, weights), precision=cfg.train.precision, own_device=choice)
    settings = cfg.backends.get(device.type, {})
    layers.lay_out(trained.model, device=device, precision=trained.precision.name, settings=settings)  # as in the run
    found = measured(cfg, trained.card, other=other)
    values = _values(trained, found, cfg)
    report = _report(trained, found, values)
    _write(folder, report, weights=Path(weights).stem)
    if arguments["--track"]:
        report["tracked"] = _track(folder, report, overrides)
    _show(trained, report)
    uris = [word for word in overrides if key_of(word) == "tracking.uri"]
    if uris and not arguments["--track"]:
        say(f"note: {without_password(uris[-1])} gets nothing of this: --track sends it there")
    return report


def _leave_steps(cfg: DictConfig) -> None:
    with open_dict(cfg):
        cfg.train.compile = cfg.train.cuda_graph = False


def _values(trained: Trained, found: Measured, cfg: DictConfig) -> dict[str, float]:
    values: dict[str, float] = {}
    are_classes = trained.card.facts.get("num_classes") is not None
    for name in found.rows:
        batches = batches_of(found, name, cfg, trained.device)
        try:
            ordered = in_order(batches.epoch(0), found.order, trained.device, are_classes=are_classes)
            reached = measure(
                trained.model,
                trained.task,
                ordered,
                precision=trained.precision,
                labels=trained.card.classes or trained.card.targets,
            )
        finally:
            batches.close()
        values |= {f"{name}/{key}": value for key, value in reached.items()}
    return values


def _report(trained: Trained, found: Measured, values: Mapping[str, float]) -> dict[str, Any]:
    then = _then(trained) if found.is_own else {}
    return {
        "run": short(trained.folder),
        "run_id": read_ack(trained.folder).run_id,
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
        "notes": [*trained.notes, *_changed(trained.folder, found)],
        "time": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
    }


def _then(trained: Trained) -> dict[str, float]:
    found = read_measured(trained.folder, trained.step)
    return {name: value for name, (value, _, _) in found.items() if name.startswith("val/") or trained.weights == BEST}


def _changed(folder: Path, found: Measured) -> list[str]:
    told = [event["digest"] for event in read_events(folder) if event["kind"] == "dataset"]
    if not found.is_own or not told or found.fingerprint.startswith(told[-1]):
        return []
    return ["the data changed since the run trained: its fingerprint differs"]


def _write(folder: Path, report: dict[str, Any], *, weights: str) -> None:
    names = [] if weights == Path(BEST).stem else [weights]
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


def _track(folder: Path, report: dict[str, Any], overrides: list[str]) -> str:
    from runner.runs.store import answering, store_of
    from runner.tracking import mlflow_store, store_uri
    from runner.tracking.mlflow_names import Names

    ack = read_ack(folder)
    run_id, uri = ack.run_id, store_of(folder, overrides, asked="evaluate --track")
    sync = f"python -m runner sync {shlex.quote(short(folder))}"
    if run_id is None:
        raise RunnerError.of("evaluate --track", "the run is not in MLflow", f"run `{sync}`, then the same command")
    prefix = "eval/" if report["is_own_data"] else f"eval/{report['data']}/"
    with answering("evaluate --track", uri):
        from mlflow.entities import Metric

        client, now, names = mlflow_store.open_store(uri), int(time.time() * 1000), Names()
        points = [
            Metric(names.key(prefix + name), value, now, report["step"]) for name, value in report["metrics"].items()
        ]
        try:
            client.log_batch(run_id, metrics=points)
        except Exception as error:
            if ack.uri in (None, "", where := store_uri.shown(uri)):
                raise
            problem = f"{first_line(error)}; the run went to {ack.uri} last"
            fix = f"use `tracking.uri={ack.uri}`, or run `{sync} tracking.uri={where}` first"
            raise RunnerError.of("evaluate --track", problem, fix) from error
    return run_id


def _show(trained: Trained, report: dict[str, Any]) -> None:
    sizes = ", ".join(f"{count:,} {name}" for name, count in report["rows"].items())
    say(f"run     {trained.title}")
    say(f"data    {report['data']}, rows: {sizes} ({report['measured']})")
    say(f"device  {report['device']} ({report['device_reason']}), {report['precision']}")
    for note in report["notes"]:
        say(f"note    {note}")
    names = list(dict.fromkeys(name.partition("/")[2] for name in report["metrics"]))
    then = report["in_the_run"]
    heads = [head for split in report["rows"] for head in ((split, f"{split}, in the run") if then else (split,))]
    rows = [["", *heads]]
    for name in names:
        cells = []
        for split in report["rows"]:
            cells.append(_number(report["metrics"].get(f"{split}/{name}")))
            cells += [_number(then.get(f"{split}/{name}"))] if then else []
        rows.append([name, *cells])
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        say(
            "  ".join(
                [row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True))]
            )
        )
    say(f"written {report['written']}" + (f"; tracked in run {report['tracked']}" if "tracked" in report else ""))


def _number(value: float | None) -> str:
    return "" if value is None else readable(value)

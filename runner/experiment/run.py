"""One composed configuration and a folder go in; a trained, tracked run comes out, as the summary of what it did."""

from __future__ import annotations

import importlib
import multiprocessing
import os
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any, NoReturn

import torch
from omegaconf import DictConfig, OmegaConf

from runner.config import origin
from runner.config.importing import loading
from runner.config.secrets import hide, kept
from runner.config.trust import check_folder
from runner.config.validate import without_password
from runner.data.balance import balance
from runner.device import Choice, Hardware, probe
from runner.distributed.environment import Place
from runner.distributed.group import Ranks
from runner.experiment import claim, processes
from runner.experiment.build import Parts, check
from runner.experiment.console import Screen
from runner.experiment.figures import illustrate
from runner.experiment.other_ranks import follow
from runner.experiment.reporter import Reporter
from runner.experiment.run_record import (
    Membership,
    Record,
    Repetition,
    introduce,
    model_name,
    publish_model,
    summarise,
    take_up,
)
from runner.experiment.summary import write_summary
from runner.models.card import write_card
from runner.tracking import recipes, stores
from runner.tracking.journal import Journal
from runner.tracking.mlflow_model import GRAPH
from runner.tracking.model_graph import forget_graph
from runner.tracking.publisher import LOG, Publisher
from runner.tracking.store_uri import shown
from runner.training.failure import fail
from runner.training.signals import Stop, listening
from runner.training.trainer import Training, Trial, train_and_test
from runner.version import IMPORTED

MANY_POINTS = 10_000  # a healthy store takes a second for them
MOST_WARNINGS = 3  # of the tracker, on the screen
#: a pruned trial did what it was to do
MLFLOW_STATUS = {"finished": "FINISHED", "pruned": "FINISHED", "killed": "KILLED", "failed": "FAILED"}


def run(
    cfg: DictConfig,
    folder: Path,
    *,
    hardware: Hardware | None = None,
    choice: Choice | None = None,
    member: Membership | None = None,
    trial: Trial | None = None,
    owns_process: bool = False,
    is_launched: bool = False,
    repetition: Repetition | None = None,
) -> dict[str, Any]:
    """Runs one experiment, from its configuration to its closed tracker. A folder that holds a part of it is gone on with:
    that it is a part of this one, the caller has seen to (claim.begin, resume.check, the sweep's ledger).

    choice, member, trial: of a sweep's job, the device that it was given, what it knows of the sweep, and its search.
    owns_process: whether a second Ctrl-C, or a signal and `train.grace_seconds`, may end the process from within.
    is_launched: whether it is of several processes that a run has started; that one holds the folder.
    repetition: of a run that repeats another one.
    Returns what summary.json holds; a training that fails is a `status` there, not an exception.
    Raises: RunnerError for what is wrong with the configuration or the data, before anything is tracked.
    """
    clock = _Clock(since_import=owns_process)
    check_folder(folder)
    recipes.check(folder)
    hardware = hardware or probe()
    is_given, choice = choice is not None, check(cfg, hardware, choice=choice)
    place = processes.place_here(cfg)
    if place is not None and place.rank:
        return follow(cfg, place, choice=choice if is_given else None)
    choices = processes.devices_here(cfg, hardware, choice, place, is_given=is_given, has_trial=trial is not None)
    with nullcontext() if is_launched else claim.taken(folder):
        if len(choices) > 1:
            rerun = _rerun(kept(_own(cfg)))
            return processes.run_in_several(cfg, folder, choices, rerun=rerun, member=member, repetition=repetition)
        ranks = processes.joined(place, choices[0])
        ranks.from_first(str(folder.absolute()))
        return _run_here(
            cfg,
            folder,
            clock=clock,
            hardware=hardware,
            choice=choices[0],
            place=place,
            ranks=ranks,
            member=member,
            trial=trial,
            owns_process=owns_process,
            repetition=repetition,
        )


def _run_here(
    cfg: DictConfig,
    folder: Path,
    *,
    clock: _Clock,
    hardware: Hardware,
    choice: Choice,
    place: Place | None,
    ranks: Ranks,
    member: Membership | None,
    trial: Trial | None,
    owns_process: bool,
    repetition: Repetition | None,
) -> dict[str, Any]:
    """As the only process, or as the first of several: the one that tracks, talks and writes."""
    screen = Screen()
    folder.mkdir(parents=True, exist_ok=True)
    screen.say(f"device: {choice.device} ({choice.reason})")
    rerun = _rerun(kept(_own(cfg)))  # before the data fills in the facts
    hide(folder, str(cfg.tracking.uri))
    forget_graph(folder / GRAPH)  # of an earlier part, or of somebody else
    with _publishing(cfg, folder, member) as publisher:
        with loading():
            importlib.import_module("torch._dynamo")  # else torch's optimizers import it, 1.5 s
        parts = processes.prepare_in_turn(cfg, ranks, torch.device(choice.here), folder=folder, place=place)
        if repetition is not None:
            repetition.check(parts)
        with Journal(folder, say=screen.say) as journal:
            (folder / "rerun.yaml").write_text(rerun)
            write_card(folder, parts.card)
            origin.sign(folder, shown(str(cfg.tracking.uri)) if cfg.tracking.enabled else "")
            record = take_up(folder)
            record.best = parts.best
            end_now = _ender(cfg, parts, record, choice=choice, folder=folder, screen=screen) if owns_process else None
            with listening(grace_seconds=cfg.train.grace_seconds, end_now=end_now) as stop:
                introduce(
                    journal,
                    cfg,
                    parts,
                    record,
                    choice=choice,
                    hardware=hardware,
                    folder=folder,
                    member=member,
                    reproduces=repetition.of if repetition else None,
                )
                _say_parts(screen, cfg, parts, folder)
                record.seconds |= {"start": clock.before, "setup": clock.lap()}
                rows = cfg.train.batch_size * cfg.train.accumulate_steps
                reporter = Reporter(record, journal=journal, publisher=publisher, screen=screen, batch_rows=rows)
                training = Training(
                    cfg,
                    parts,
                    record,
                    reporter=reporter,
                    screen=screen,
                    stop=stop,
                    folder=folder,
                    trial=trial,
                    ranks=ranks,
                )
                train_and_test(training)
                for finding in record.findings:
                    screen.say(f"guard: {finding}")
                if record.status != "failed":  # else another one may be gone, and nobody waits for it
                    ranks.leave()
                clock.lap()
                _close(journal, cfg, parts, record, folder, screen, publisher)
        summary = summarise(cfg, parts, record, choice)
        summary |= {"num_processes": ranks.num, "exit_code": stop.exit_code}
        with _failing(record):
            write_summary(folder, summary)  # it is there even if nobody waits for the tracker
        if publisher is not None:
            summary |= _last_words(publisher, cfg, screen, within=stop.seconds_left)
    summary["seconds"] |= {"finish": clock.lap(), "total": clock.total()}
    with _failing(record):
        write_summary(folder, summary)
    summary |= {"status": record.status, "error": record.error}
    screen.result(summary, folder=_short(folder), next_lines=_what_next(cfg, summary, folder))
    return summary


@contextmanager
def _publishing(cfg: DictConfig, folder: Path, member: Membership | None) -> Iterator[Publisher | None]:
    """The process that publishes to MLflow, started at once: importing mlflow and making its store take seconds.

    None where nothing is tracked, and where the sweep's own process does it.
    """
    if not cfg.tracking.enabled or (member is not None and not member.publishes):
        yield None
        return
    with Publisher.start(folder, str(cfg.tracking.uri), grace_seconds=cfg.tracking.grace_seconds) as publisher:
        yield publisher


def _close(
    journal: Journal,
    cfg: DictConfig,
    parts: Parts,
    record: Record,
    folder: Path,
    screen: Screen,
    publisher: Publisher | None,
) -> None:
    """The model, pictures and the status: the last of the journal."""
    with _failing(record):
        if record.status == "finished" and cfg.tracking.log_model:
            publish_model(journal, parts, folder, is_tracked=cfg.tracking.enabled)
            if publisher is not None:
                publisher.wake()  # it goes while the pictures are drawn
    with _failing(record):
        _illustrate(journal, cfg, parts, record, folder, screen)
    with _failing(record):
        journal.event("end", status=MLFLOW_STATUS[record.status], end_ms=int(time.time() * 1000))


@contextmanager
def _failing(record: Record) -> Iterator[None]:
    """A disk that takes nothing more is the run's error, and no reason to leave out what comes after."""
    try:
        yield
    except OSError as error:
        if record.status != "failed":
            fail(record, error)


def _illustrate(journal: Journal, cfg: DictConfig, parts: Parts, record: Record, folder: Path, screen: Screen) -> None:
    if illustrate(
        parts, record, folder, of=f"{model_name(cfg)} on {parts.source.name}, {parts.device}", say=screen.say
    ):
        journal.event("artifact", path="plots", to="plots")


def _last_words(publisher: Publisher, cfg: DictConfig, screen: Screen, *, within: float) -> dict[str, Any]:
    """Waits for MLflow to have everything, but no longer than it answers, and than there is time (s)."""
    pending = publisher.ack().points_pending
    if pending > MANY_POINTS:
        screen.say(f"tracking: {pending:,} points are on their way; Ctrl-C leaves that to the background")
    try:
        ack = publisher.finish(within=within)
    except KeyboardInterrupt:
        screen.say("tracking: not waited for; what is left goes to MLflow in the background")
        ack = publisher.ack()
    if not ack.is_complete:
        why = f" ({ack.error})" if ack.error else ""
        uri = without_password(str(cfg.tracking.uri))
        screen.say(f"tracking: {ack.points_pending:,} points have not reached {uri}{why}; they are kept in the journal")
    for warning in ack.warnings[:MOST_WARNINGS]:
        screen.say(f"tracking: {warning}")
    if (more := len(ack.warnings) - MOST_WARNINGS) > 0:
        screen.say(f"tracking: {more} more of the kind in {LOG}")
    return {
        "run_id": ack.run_id,
        "tracker": ack.counts,
    }


def _ender(
    cfg: DictConfig, parts: Parts, record: Record, *, choice: Choice, folder: Path, screen: Screen
) -> Callable[[Stop, str], NoReturn]:
    """What ends this process without waiting for anything or anybody.

    The publisher notices, sends what the journal holds, and marks the run as killed.
    """

    def end_now(stop: Stop, why: str) -> NoReturn:
        with suppress(Exception):  # the training goes on beside this, and may be in the middle of anything
            record.status, record.error = "killed", why
            summary = summarise(cfg, parts, record, choice) | {"exit_code": stop.exit_code}
            write_summary(folder, summary)
            screen.end_now(f"ended at once: {why}; what its last checkpoint and its journal hold is kept")
            screen.say(f"next    python -m runner resume {shlex.quote(_short(folder))}")
        for child in multiprocessing.active_children():  # that read data
            child.kill()
        os._exit(stop.exit_code)

    return end_now


def _own(cfg: DictConfig) -> DictConfig:
    """The run's own keys: how a sweep was run, or a plan made, is no part of running it again."""
    return OmegaConf.masked_copy(cfg, [str(key) for key in cfg if key not in ("sweep", "plan")])


def _rerun(own: DictConfig) -> str:
    """The text of rerun.yaml."""
    return "defaults: [schema, base, _self_]\n" + OmegaConf.to_yaml(own)


def _say_parts(screen: Screen, cfg: DictConfig, parts: Parts, folder: Path) -> None:
    sizes = ", ".join(f"{count:,} {name}" for name, count in parts.splits.sizes.items())
    screen.say(f"data:   {parts.source.name}, rows: {sizes}; {parts.residency}")
    for note in filter(None, (*parts.source.notes, balance(parts.source))):
        screen.say(f"data:   {note}")
    words = (model_name(cfg), f"{parts.num_parameters:,} parameters", cfg.train.precision, parts.layout, parts.threads)
    screen.say(f"model:  {', '.join(word for word in words if word)}")
    if parts.weights:
        screen.say(f"starts: {parts.weights}")
    screen.say(f"folder: {_short(folder)}")


def _what_next(cfg: DictConfig, summary: Mapping[str, Any], folder: Path) -> dict[str, str]:
    rows, command_folder = {}, shlex.quote(_short(folder))
    if cfg.tracking.enabled:
        uri = without_password(str(cfg.tracking.uri))
        rows["MLflow"] = f"run {summary['run_id']} in {uri}" if summary["run_id"] else f"not reached: {uri}"
        pending = summary["tracker"]["points_pending"]
        words = f"sync {command_folder}" if pending or not summary["run_id"] else "ui"
        rows["next"] = f"python -m runner {words} {stores.words_for(str(cfg.tracking.uri))}".rstrip()
    if summary["status"] == "killed" or summary["ending"] in ("max_seconds", "disk_full"):
        rows["next"] = f"python -m runner resume {command_folder}"
    if (folder / "rerun.yaml").exists():
        rows["again"] = f"python -m runner -cd {command_folder} -cn rerun seed=1"
    return rows


def _short(folder: Path) -> str:
    here = Path.cwd()
    return str(folder.relative_to(here)) if folder.is_relative_to(here) else str(folder)


class _Clock:
    """Seconds since the command began, in laps."""

    def __init__(self, *, since_import: bool) -> None:
        """since_import: whether the process is this run's alone, and its imports are the run's start.

        Not since the process was made: a shell that becomes its last command hands its age on, and 117 s of
        `pip install` were told as the run's.
        """
        self._began = self._lap = time.perf_counter()
        self.before = self._began - IMPORTED if since_import else 0.0

    def lap(self) -> float:
        before, self._lap = self._lap, time.perf_counter()
        return self._lap - before

    def total(self) -> float:
        return self.before + time.perf_counter() - self._began

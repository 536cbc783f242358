"""A run's folder, its id in MLflow or `last` goes in; the configuration that goes on with it comes out, or why it can't."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.errors import Fault, RunnerError
from runner.passwords import kept
from runner.tracking.ack import read_ack
from runner.tracking.journal import is_being_written
from runner.trust import check_folder

#: what a resumed run may change: how long it is, what it notes, where it runs; all else would be another experiment
MAY_CHANGE = (
    "train.num_epochs",
    "train.num_steps",
    "train.max_seconds",
    "train.grace_seconds",
    "train.on_oom",
    "train.early_stopping.patience",
    "train.checkpoint_every",
    "train.num_processes",
    "train.compile",
    "metrics.pull_every",
    "placement.",
    "tracking.",
    "backends.",
    "data.num_workers",
    "data.residency",
    "device",
    "name",
    "plan.",
    "sweep.",
)
ROOTS = ("outputs", "multirun")


def find(wanted: str, *, verb: str = "resume") -> Path:
    """The folder of a run. wanted: the folder itself, `last`, or a run's id in MLflow or the beginning of it.

    verb: of the command that asks, for the messages.
    Raises: RunnerError where there is none, where it is of a sweep as a whole, where another process works in it, and
    for what may not be in it.
    """
    folder = Path(wanted)
    if wanted == "last":
        folders = newest_first()
        if not folders:
            raise RunnerError(Fault(f"{verb} last", f"no run lies below {' or '.join(ROOTS)}", f"{verb} FOLDER"))
        folder = folders[0]
    elif not folder.is_dir():
        folder = _by_id(wanted, verb)
    check_folder(folder)
    if (folder / "ledger.jsonl").is_file():
        write = f"the words of the sweep with sweep.resume={folder}" if verb == "resume" else f"{verb} {folder}/0, say"
        raise RunnerError(Fault(f"{verb} {wanted}", "that is a sweep's folder, with many runs in it", write))
    if not (folder / "rerun.yaml").is_file():
        so = f"{folder} holds no run: it has no rerun.yaml"
        raise RunnerError(Fault(f"{verb} {wanted}", so, f"{verb} last, or the folder that the run's last lines name"))
    if is_being_written(folder):
        raise RunnerError(
            Fault(f"{verb} {wanted}", "it is running: another process writes there", "when that has ended")
        )
    return folder


def check(before: DictConfig, now: DictConfig) -> None:
    """Raises: RunnerError for each key that would make another experiment of it."""
    old, new = flat(before), flat(now)
    faults = []
    for key in sorted(old.keys() | new.keys()):
        if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE):
            asked, was = f"{key}={new.get(key)}", f"{key}={old.get(key)}"
            so = f"the run began with {was}, and with another value it would be another experiment"
            faults.append(Fault(asked, so, f"{was}, or a new run: python -m runner -cd FOLDER -cn rerun {asked}"))
    if faults:
        raise RunnerError(*faults)


def _folders() -> list[Path]:
    return [path.parent for root in ROOTS for path in Path(root).glob("*/*/**/rerun.yaml")]


def newest_first() -> list[Path]:
    """The folders of the runs below outputs/ and multirun/, by when they were last begun or gone on with."""
    return sorted(_folders(), key=lambda found: (found / "rerun.yaml").stat().st_mtime, reverse=True)


def with_id(wanted: str) -> list[Path]:
    """The folders of the runs below outputs/ and multirun/ whose id in MLflow begins so."""
    return [folder for folder in _folders() if (read_ack(folder).run_id or "").startswith(wanted)]


def _by_id(wanted: str, verb: str) -> Path:
    found = with_id(wanted)
    if len(found) == 1:
        return found[0]
    if found:
        so = f"{len(found)} runs begin so: {', '.join(map(str, found[:3]))}"
        raise RunnerError(Fault(f"{verb} {wanted}", so, f"{verb} {found[0]}"))
    so = f"there is no folder {wanted}, and no run below {' or '.join(ROOTS)} has that id"
    raise RunnerError(Fault(f"{verb} {wanted}", so, f"{verb} last, or the folder that the run's last lines name"))


def flat(cfg: DictConfig) -> dict[str, Any]:
    """Every value by its dotted key, its ${...} as they are written."""
    found: dict[str, Any] = {}

    def walk(node: Any, key: str) -> None:
        if isinstance(node, dict):
            for name, child in node.items():
                walk(child, f"{key}.{name}" if key else str(name))
        else:
            found[key] = node

    walk(OmegaConf.to_container(kept(cfg), resolve=False, throw_on_missing=False), "")
    return found


def is_over(summary: dict[str, Any], changed: Sequence[str]) -> bool:
    """Whether there is nothing left to do: it has come to its end, and nobody asks for more."""
    is_at_end = summary.get("status") in ("finished", "pruned") and summary.get("ending") != "max_seconds"
    return is_at_end and not any(word.startswith("train.") for word in changed)

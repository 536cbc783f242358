"""Says how the code of a run that is repeated is had again, and refuses other data. What else is not as it was: making.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from torch.utils.data import Dataset

from runner.errors import Fault, RunnerError
from runner.experiment import provenance
from runner.experiment.run_record import data_digest
from runner.runs.reproduce.making import is_same_code, of_run
from runner.runs.reproduce.recorded import DIFF, Original
from runner.training.parts import Parts


def how_to_get_the_code(original: Original, here: provenance.Git | None) -> str:
    """The words that bring the code back that the run was made with, where it was changed after its commit; or none."""
    commit = original.tags.get("git_commit")
    if commit is None or original.tags.get("git_dirty") != "true" or is_same_code(of_run(original).git, here):
        return ""
    if original.store is None:
        is_root = Path(".git").exists()
        path = f"{original.name}/{DIFF}" if is_root else str(original.folder / DIFF)
    else:
        path = DIFF
    stash = "git stash && " if here is not None and here.dirty else ""
    return f"{stash}git checkout {commit} && git apply {path}"


def data_check(original: Original, *, anyway: bool, say: Callable[[str], None]) -> Callable[[Parts], None]:
    """A function that takes the built parts and raises a RunnerError when their data is not what the run had."""

    def check(parts: Parts) -> None:
        before, now = str(original.dataset.get("digest") or ""), data_digest(parts)
        if not before:
            say("data:   nothing is known of what it had: not compared")
        elif before == now:
            rows = parts.source.rows
            limits = " (of a Dataset its class and length alone)" if isinstance(rows, Dataset) else ""
            say(f"data:   the same as then, by its fingerprint {now[:12]}{limits}")
        else:
            problem = f"{original.data} then; {parts.source.name}, {sum(parts.splits.sizes.values()):,} rows, fingerprint {now[:12]} now"
            if not anyway:
                asked = f"reproduce {original.name}"
                fix = "that data, or --anyway to go on with this"
                raise RunnerError(Fault(asked, f"the data is not the same: {problem}", fix))
            say(f"warning: the data is not the same: {problem}")

    return check

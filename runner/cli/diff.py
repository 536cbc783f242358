"""`python -m runner diff A B [...]`: prints what is not the same in runs, and where their curves part."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from string import ascii_uppercase

from rich.table import Table
from rich.text import Text

from runner.cli.compare import sweep_folder
from runner.config.trust import check_folder
from runner.errors import Problem, RunnerError
from runner.experiment.terminal import Terminal, readable
from runner.runs.diff import Diff
from runner.runs.reproduce.compare import where_parted
from runner.runs.reproduce.making import Difference
from runner.sweep.jobs import ledger

FORMS = "diff A B, each a run's folder, a sweep's, an id in MLflow, or last"
MOST_BESIDE = 4  # runs that stand beside each other; more of them stand below each other
TITLES = ("metric", "parts at", "by", "last A", "last B", "best A", "best B")


def runs_of(words: Sequence[str]) -> list[str]:
    """The runs that are meant: in the place of a sweep its jobs. Raises: RunnerError for fewer than two."""
    found = [run for word in words for run in (_jobs(word) or [word])]
    if len(found) < 2:
        problem = "it takes two runs or more" if len(words) < 2 else "one of them has no job that has begun"
        raise RunnerError(Problem(f"diff {' '.join(words)}".strip(), problem, FORMS))
    return found


def show(found: Diff) -> None:
    """Prints the runs, what differs in their configurations and in what they were made with, and their curves."""
    terminal = Terminal(soft_wrap=False)
    names = _names(len(found.runs))
    for name, run in zip(names, found.runs, strict=True):
        was, words = run.original, f"  {run.words}" * (len(names) == 2)
        terminal.print(Text(f"{name}  {was.name} ({was.status}, {was.last_step:,} steps){words}"), soft_wrap=True)
    for title, rows in (("configuration", found.configuration), ("made with", found.made_with)):
        terminal.print()
        if rows:
            terminal.print(_table(title, rows, names))
        else:
            terminal.print(f"{title}: the same, as far as it is known")
    if found.unknown:
        terminal.print(f"not noted by all of them: {', '.join(found.unknown)}")
    terminal.print()
    terminal.print(_curves(found) if len(found.runs) == 2 else _of_several(found, names))
    if len(found.runs) == 2:
        terminal.print(Text(found.sentence), soft_wrap=True)


def _jobs(word: str) -> list[str]:
    folder = sweep_folder(word) if word != "last" else None
    if folder is None:
        return []
    check_folder(folder)
    sweep = ledger.read(folder)
    folders = [sweep.folder_of(sweep.jobs[number]) for number in sorted(sweep.jobs) if sweep.jobs[number].folder_name]
    return [str(each) for each in folders if (each / "rerun.yaml").is_file()]


def _names(count: int) -> list[str]:
    return list(ascii_uppercase[:count]) if count <= len(ascii_uppercase) else [str(number) for number in range(count)]


def _table(title: str, rows: Sequence[Difference], names: Sequence[str]) -> Table:
    if len(names) <= MOST_BESIDE:
        return _filled((title, *names), ((each.what, *each.values) for each in rows))
    columns = zip(*(each.values for each in rows), strict=True)
    return _filled(
        (title, *(each.what for each in rows)), ((name, *of) for name, of in zip(names, columns, strict=True))
    )


def _curves(found: Diff) -> Table:
    a, b = found.runs
    rows = []
    for each in found.curves[0]:
        parts = ("no point in common", "") if not each.num_common else ("never", "")
        if each.parted_step is not None:
            parts = f"{each.parted_step:,}", f"{each.parted_by:.1e}"
        ends = [run.values.get(each.name) for run in (a, b)]
        values = [readable(end[place]) if end else "" for place in (0, 1) for end in ends]
        rows.append((each.name, *parts, *values))
    return _filled(TITLES, rows, right=range(1, len(TITLES)))


def _of_several(found: Diff, names: Sequence[str]) -> Table:
    metrics = [name for name in found.runs[0].values if name.startswith(("val/", "test/")) or name == "train/loss"]
    rows = []
    for number, (name, run) in enumerate(zip(names, found.runs, strict=True)):
        first = where_parted(found.curves[number - 1]) if number else None
        parts = f"step {first.parted_step:,}" if first and first.parted_step is not None else "nowhere"
        ends = (run.values.get(metric) for metric in metrics)
        rows.append((name, parts if number else "", *(readable(end[0]) if end else "" for end in ends)))
    return _filled(("", f"parts from {names[0]}", *metrics), rows, right=range(1, len(metrics) + 2))


def _filled(titles: Sequence[str], rows: Iterable[Sequence[str]], *, right: Iterable[int] = ()) -> Table:
    table, numbers = Table(box=None, pad_edge=False, header_style="bold"), set(right)
    for place, title in enumerate(titles):
        table.add_column(title, justify="right" if place in numbers else "left", overflow="fold")
    for row in rows:
        table.add_row(*map(Text, row))
    return table

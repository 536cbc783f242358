"""What the scripts of this folder share: options, commands in turns, tables, and the sections of README.md that they write."""

from __future__ import annotations

import io
import json
import os
import platform
import re
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from argparse import ArgumentParser
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from datetime import date
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")
HERE = Path(__file__).resolve().parent
ROOT, PAGE, PEERS = HERE.parents[1], HERE / "README.md", HERE / "peers"
END = "<!-- end -->"
PACKAGES = ("torch", "mlflow", "numpy")
RUNNER = [sys.executable, "-m", "runner"]


def parser(description: str | None, *, repeats: int | None = None) -> ArgumentParser:
    """Return a parser with --write and, with a default for it, --repeats."""
    options = ArgumentParser(description=description)
    if repeats is not None:
        options.add_argument("--repeats", type=int, default=repeats)
    told = "what is printed becomes this script's section of README.md here"
    options.add_argument("--write", action="store_true", help=told)
    return options


def environment(threads: int | None = 1) -> dict[str, str]:
    """Return the environment with this project and no banners and telemetry. threads: For all libraries; None: as it is."""
    quiet = {"PYTHONWARNINGS": "ignore", "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    limit = {} if threads is None else {"OMP_NUM_THREADS": str(threads)}
    return {**os.environ, **quiet, **limit, "PYTHONPATH": paths}


def timed(command: Sequence[str], folder: Path, *, threads: int | None = 1) -> tuple[float, str]:
    """Run a command in a folder. Returns its seconds and its output. Raises: RuntimeError if it fails."""
    folder.mkdir(exist_ok=True)
    began = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env=environment(threads), cwd=folder, check=False)
    if done.returncode:
        raise RuntimeError(f"{shlex.join(command)} failed:\n{done.stdout}{done.stderr}")
    return time.perf_counter() - began, done.stdout


def summary_of(words: Sequence[str], *, threads: int | None = 1) -> dict[str, Any]:
    """Return summary.json of an untracked run with these overrides, in a temporary directory and a separate process."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "tests").symlink_to(ROOT / "tests")  # an experiment reads a text there
        timed([*RUNNER, *words, "tracking.enabled=false", "hydra.run.dir=run"], Path(folder), threads=threads)
        found: dict[str, Any] = json.loads((Path(folder) / "run" / "summary.json").read_text())
    return found


def orders(names: Iterable[T], repeats: int) -> list[list[T]]:
    """Return the order of each turn: each starts with another one, as the first of a turn was measured too slow (issue 7)."""
    each = list(dict.fromkeys(names))
    starts = [number * len(each) // repeats for number in range(repeats)]
    return [each[start:] + each[:start] for start in starts]


def in_turns(names: Iterable[T], repeats: int, measure: Callable[[T, int], float]) -> dict[T, list[float]]:
    """Call measure(name, turn) for every name in each turn. Returns the results of all turns by name."""
    each = list(names)
    found: dict[T, list[float]] = {name: [] for name in each}
    for turn, order in enumerate(orders(each, repeats)):
        for name in order:
            found[name].append(measure(name, turn))
    return found


def median_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Return the median of the ratios within each turn."""
    return statistics.median(mine / other for mine, other in zip(ours, theirs, strict=True))


def spread(values: Sequence[float], form: str = ".1f") -> str:
    """Return the median, and the lowest and highest value, as two cells."""
    return f"{statistics.median(values):{form}} | {min(values):{form}} to {max(values):{form}}"


def row(*cells: object) -> None:
    print(f"| {' | '.join(map(str, cells))} |", flush=True)


def head(*cells: str) -> None:
    row(*cells)
    print("|" + "---|" * len(cells), flush=True)


def header(repeats: int, threads: int | None = None, *, packages: Iterable[str] = PACKAGES) -> str:
    """Return the line of the machine, the versions and the number of turns."""
    versions = ", ".join(f"{name} {_version(name)}" for name in dict.fromkeys(packages))
    machine = f"{platform.machine()}, {os.cpu_count()} cores ({_processor()}), Python {platform.python_version()}"
    limit = "" if threads is None else f"; {threads} thread(s)"
    return f"{machine}; {versions}{limit}; n = {repeats}, in turns\n"


def _version(name: str) -> str:
    try:
        return version(name)
    except PackageNotFoundError:
        return "of unknown version"


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or "unknown"
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


@contextmanager
def section(name: str, *, write: bool) -> Iterator[None]:
    """Print the output, and with `write` also put it into the section of that name if the block succeeds."""
    both = _Both(sys.stdout)
    with redirect_stdout(both):
        yield
    if write:
        replace(PAGE, name, f"{made_by()}:\n\n{both.getvalue().strip()}")


def replace(page: Path, name: str, text: str) -> None:
    """Put the text between `<!-- name -->` and `<!-- end -->`, or at the end of the page if it has no such section."""
    begin, old = f"<!-- {name} -->", page.read_text(encoding="utf-8")
    whole = f"{begin}\n{text}\n{END}"
    pattern = re.compile(f"{re.escape(begin)}\n.*?{re.escape(END)}", re.DOTALL)
    new, count = pattern.subn(lambda _: whole, old)
    page.write_text(new if count else f"{old.rstrip()}\n\n{whole}\n", encoding="utf-8")


def made_by() -> str:
    """Return the first line of a section: the command, the day and the commit."""
    words = [word for word in sys.argv[1:] if word != "--write"]
    command = shlex.join(["python", f"tests/bench/{Path(sys.argv[0]).name}", *words])
    describe = ["git", "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    done = subprocess.run(describe, cwd=ROOT, capture_output=True, text=True, check=False)
    return f"By `{command}`, {date.today()}, commit {done.stdout.strip() or 'unknown'}"


class _Both(io.StringIO):
    """Keeps the written text, and prints it immediately."""

    def __init__(self, screen: io.TextIOBase) -> None:
        super().__init__()
        self.screen = screen

    def write(self, text: str) -> int:
        self.screen.write(text)
        self.screen.flush()
        return super().write(text)

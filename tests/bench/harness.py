"""Write a script's output into the tables: printed and, with --write, a section of tests/bench/README.md, which is not edited by hand."""

from __future__ import annotations

import io
import re
import shlex
import subprocess
import sys
from argparse import ArgumentParser
from collections.abc import Iterator
from contextlib import contextmanager, redirect_stdout
from datetime import date
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PAGE = HERE / "README.md"
END = "<!-- end -->"


def add_write(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--write", action="store_true", help="what is printed becomes this script's section of README.md here"
    )


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
    return f"By `{command}`, {date.today()}, commit {_commit()}"


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty=, with changes", "--exclude=*"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


class _Both(io.StringIO):
    """Keeps the written text, and prints it immediately."""

    def __init__(self, screen: io.TextIOBase) -> None:
        super().__init__()
        self.screen = screen

    def write(self, text: str) -> int:
        self.screen.write(text)
        self.screen.flush()
        return super().write(text)

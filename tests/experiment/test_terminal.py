"""The output in a terminal: short numbers, and external names without control characters."""

import io
import math
import random
import re

import pytest
from rich.progress import Progress
from rich.table import Table
from rich.text import Text
from synthetic_sweep import Folder

from runner.cli.answer import report
from runner.errors import Problem, RunnerError
from runner.experiment.console import Screen
from runner.experiment.terminal import WIDTH, Terminal, readable, say
from runner.sweep.report import build, tables

#: sets the title, clears the screen and sets colors, also with C1's one-byte forms
HOSTILE = "a\x1b]0;PWNED\x07\x1b[2J\x1b[31m\x9b2J\x9d0;PWNED\x9c\x08\r\x00\x7f\x85b"
CONTROLS = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


@pytest.fixture
def console(monkeypatch):
    """A terminal with colors."""
    monkeypatch.setenv("TTY_COMPATIBLE", "1")
    made = Terminal()
    made.file, made._force_terminal, made._color_system = io.StringIO(), True, made._color_system
    return made


def shown(console):
    return console.file.getvalue()


@pytest.mark.parametrize("form", [str, Text, lambda said: Text(said, style="red")])
def test_terminal_shows_control_characters_escaped(console, form):
    console.print(form(HOSTILE), markup=False)
    table = Table("name", title=HOSTILE)
    table.add_row(form(HOSTILE))
    console.print(table)
    own = re.sub(r"\x1b\[[0-9;]*m", "", shown(console))  # rich's colors
    assert not CONTROLS.search(own), own
    assert "\\x1b]0;PWNED" in own and "\\x9b2J" in own


def test_say_keeps_newlines_and_tabs_only(console, capsys):
    console.print("a\n\tb")
    assert shown(console) == "a\n        b\n"
    say("a\n\tb")
    assert capsys.readouterr().out == "a\n\tb\n"
    say(HOSTILE)
    assert not CONTROLS.search(capsys.readouterr().out)


def test_the_bar_still_moves_the_cursor(console):
    with Progress(console=console, auto_refresh=False, transient=True) as bar:
        bar.add_task(HOSTILE, total=2)
        bar.refresh()
    assert "\x1b[?25l" in shown(console) and "\x1b[1A" in shown(console) and "\x1b[2K" in shown(console)
    assert "\x1b[2J" not in shown(console) and "\\x1b[2J" in shown(console)


def test_error_escapes_control_characters(capsys):
    report(RunnerError(Problem(f"name={HOSTILE}", HOSTILE, HOSTILE)))
    said = capsys.readouterr().err
    assert not CONTROLS.search(said) and said.count("\\x1b[2J") == 3


def test_tables_escape_control_characters_in_names(tmp_path, capsys):
    sweep = Folder(tmp_path)
    metrics = {f"val/{HOSTILE}": 1.0}
    sweep.job((f"name={HOSTILE}",), name=HOSTILE, summary={"metrics": metrics}, device=HOSTILE)
    sweep.job(("seed=1",), "failed", name=HOSTILE, error=HOSTILE)
    tables.show(build.write(sweep.close()), Terminal())
    Screen().say(HOSTILE)
    said = capsys.readouterr().out
    assert "PWNED" in said and not CONTROLS.search(said), said


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0.0000"), (0.0, "0.0000"), (0.98321, "0.9832"), (0.99999, "0.99999"), (-0.99999, "-0.99999"),
        (0.999999999, "0.9999999"), (1.0, "1.0000"), (-2.5, "-2.5000"), (99.99999, "100.0"), (123456.7, "123,456.7"),
        (-999_999.94, "-999,999.9"), (999_999.96, "1.000e+06"), (62847922176.0, "6.285e+10"), (0.0005, "5.000e-04"),
        (16417543687602438144.0, "1.642e+19"), (-1e19, "-1.000e+19"), (1e-12, "1.000e-12"), (math.nan, "nan"),
        (math.inf, "inf"), (-math.inf, "-inf"),
    ],
)  # fmt: skip
def test_what_is_shown(value, shown):
    assert readable(value) == shown


def test_readable_numbers_are_narrow_and_accurate():
    draw = random.Random(0)
    for _ in range(5_000):
        value = draw.choice((-1, 1)) * 10 ** draw.uniform(-30, 38)
        shown = readable(value)
        assert len(shown) <= WIDTH
        assert float(shown.replace(",", "")) == pytest.approx(value, rel=6e-4, abs=6e-5)

"""A script's --write: its output replaces its section, and nothing else on the page."""

from __future__ import annotations

import sys

import pytest

OLD = "# Figures\n\n<!-- a.py -->\nold\n<!-- end -->\n\nwords\n\n<!-- a.py small -->\nkept\n<!-- end -->\n"


@pytest.fixture
def page(bench, tmp_path, monkeypatch):
    module = bench("page")
    monkeypatch.setattr(module, "PAGE", tmp_path / "README.md")
    module.PAGE.write_text(OLD)
    monkeypatch.setattr(sys, "argv", ["tests/bench/a.py", "--steps", "3 4", "--write"])
    return module


def test_what_is_printed_is_shown_and_written(page, capsys):
    with page.section("a.py", write=True):
        print(r"| x | 1\2 |")
    assert capsys.readouterr().out == "| x | 1\\2 |\n"
    text = page.PAGE.read_text()
    made, _, rest = text.partition("<!-- a.py -->\n")[2].partition(":\n\n")
    assert made.startswith("By `python tests/bench/a.py --steps '3 4'`, 20") and ", commit " in made
    assert rest == "| x | 1\\2 |\n<!-- end -->" + OLD.partition("old\n<!-- end -->")[2]


def test_page_stays_without_write_or_after_error(page):
    with page.section("a.py", write=False):
        print("new")
    with pytest.raises(RuntimeError), page.section("a.py", write=True):
        print("half")
        raise RuntimeError
    assert page.PAGE.read_text() == OLD


def test_page_new_section_is_last(page):
    with page.section("b.py", write=True):
        print("new")
    assert page.PAGE.read_text().startswith(OLD.rstrip() + "\n\n<!-- b.py -->\nBy ")
    assert page.PAGE.read_text().endswith("\n\nnew\n<!-- end -->\n")


def test_readme_rows_exist_when_measured(bench):
    table = bench("table")
    rows = [(table.PEERS[name], every) for name in table.SHORT for every in table.SHORT_EVERY]
    turns = [
        {
            row: {"seconds_steady": (place + turn) / 1e3, "num_steps_steady": 1, "points": 7}
            for place, row in enumerate(rows, 1)
        }
        for turn in (0, 2)
    ]
    found = table.short(turns)
    heads = "µs per step, every step logged | points in MLflow | µs per step, every 50 steps logged | points in MLflow"
    assert found[0] == f"| loop | {heads} |"
    assert found[2] == "| hand-written limit | 2,000 (1,000 to 3,000) | 7 | 3,000 (2,000 to 4,000) | 7 |"
    assert len(found) == 2 + len(table.SHORT)
    assert table.short([turns[0], {row: turns[1][row] for row in rows[1:]}]) == []

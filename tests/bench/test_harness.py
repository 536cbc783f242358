"""Commands in turns, and --write: a script's output replaces its section, and nothing else on the page."""

from __future__ import annotations

import sys

import pytest

OLD = "# Figures\n\n<!-- a.py -->\nold\n<!-- end -->\n\nwords\n\n<!-- a.py small -->\nkept\n<!-- end -->\n"


@pytest.fixture
def page(bench, tmp_path, monkeypatch):
    module = bench("harness")
    monkeypatch.setattr(module, "PAGE", tmp_path / "README.md")
    module.PAGE.write_text(OLD)
    monkeypatch.setattr(sys, "argv", ["tests/bench/a.py", "--steps", "3 4", "--write"])
    return module


def test_what_is_printed_is_shown_and_written(page, capsys):
    with page.section("a.py", write=True):
        page.row("x", r"1\2")
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


def test_each_turn_begins_with_another(bench):
    harness, measured = bench("harness"), []
    found = harness.in_turns("abbc", 3, lambda name, turn: measured.append(name) or turn)
    assert (measured, found) == ([*"abc", *"bca", *"cab"], {name: [0, 1, 2] for name in "abc"})
    assert harness.orders("abcd", 2) == [[*"abcd"], [*"cdab"]]


def test_ratio_is_of_the_same_turn(bench):
    harness = bench("harness")
    assert harness.median_ratio([5.0, 4.0, 12.0], [1.0, 2.0, 4.0]) == 3.0  # not 5 / 2
    assert harness.spread([5.0, 4.0, 12.0], ".0f") == "5 | 4 to 12"


def test_failed_command_shows_its_output(bench, tmp_path):
    with pytest.raises(RuntimeError, match="it broke"):
        bench("harness").timed([sys.executable, "-c", "raise SystemExit('it broke')"], tmp_path)

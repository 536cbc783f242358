"""Compare the errors of a package's tests with `tests/PACKAGE/messages.txt`; `pytest --update-snapshots` rewrites it."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from runner.errors import Problem, for_a_shell, render

TESTS = Path(__file__).parents[1]


def read(path: Path) -> dict[str, str]:
    """Return the texts of a file by the name of their test."""
    parts = re.split(r"^== (.*)\n", path.read_text(), flags=re.MULTILINE)[1:] if path.exists() else []
    return {name: text.strip() for name, text in zip(parts[::2], parts[1::2], strict=True)}


def shown(problem: Problem) -> str:
    """Return an error as the terminal shows it, with its code, and with the suggestions that the help leaves out."""
    hidden = [each for each in problem.suggestions if each not in problem.help]
    return "\n".join([render(problem, kind=f"error[{problem.code}]"), *(f"suggestion: {each}" for each in hidden)])


def check_typed(problem: Problem) -> None:
    """Fail unless a shell and Hydra accept every suggestion as it is."""
    from hydra.core.override_parser.overrides_parser import OverridesParser  # takes 0.2 s

    assert all(each == for_a_shell(each) for each in problem.suggestions)
    for word in (word for suggestion in problem.suggestions for word in shlex.split(suggestion)):
        if "=" in word and not word.startswith("-"):
            OverridesParser.create().parse_override(word)


def _numbers(name: str) -> list[str | int]:
    return [int(part) if part.isdecimal() else part for part in re.split(r"(\d+)", name)]


@pytest.fixture
def messages(request: pytest.FixtureRequest, tmp_path: Path):
    """Compare errors with the snapshot of this test, and return them."""
    package, _, test = request.node.nodeid.removeprefix("tests/").partition("/")
    path = TESTS / package / "messages.txt"
    calls: list[str] = []

    def compare(errors):
        found = getattr(errors, "problems", [errors] if isinstance(errors, Problem) else errors)
        for problem in found:
            check_typed(problem)
        text = re.sub(rf"{re.escape(str(tmp_path.parent))}/[\w.-]+", "TMP", "\n\n".join(map(shown, found)))
        calls.append(text.replace(sys.executable, "python").strip())
        known = read(path)
        name = test if len(calls) == 1 else f"{test} ({len(calls)})"
        if request.config.getoption("--update-snapshots"):
            own = re.compile(rf"{re.escape(test)}( \(\d+\))?")
            known = {key: text for key, text in known.items() if not own.fullmatch(key)}
            known |= {f"{test} ({num})": text for num, text in enumerate(calls[1:], 2)} | {test: calls[0]}
            path.write_text("\n\n".join(f"== {key}\n{known[key]}" for key in sorted(known, key=_numbers)) + "\n")
        else:
            assert calls[-1] == known.get(name), f"{name}: pytest --update-snapshots {request.node.nodeid!r}"
        return errors

    return compare

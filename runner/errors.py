"""Errors of the user, how they are shown, and the secrets that no text shows."""

from __future__ import annotations

import difflib
import errno
import math
import os
import re
import stat
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self, TextIO
from urllib.parse import quote, unquote, unquote_plus

#: the exit code of an error of the user
MISTAKE = 2
#: the secrets of this process and of those that it starts, comma-separated: a variable's name, or =VALUE, percent-encoded
SECRETS = "RUNNER_SECRETS"
SHORTEST_SECRET = 4  # letters: a shorter one is part of many words
#: a value from elsewhere: ${...} as it is written, <oc.env:NAME> as it is shown
REFERENCE = r"(?:\$\{[^{}]*\}|<oc\.env:[^<>]+>)"
KEPT = REFERENCE.replace("{}]", "{},]")  # without a default, which may be a secret
_USER = rf"(?:://|\bhttps?:/)(?:{REFERENCE}|[^:/@\s])*+"  # Path() leaves one slash
#: credentials that only refer to a secret
_REFERS = rf"(?:{_USER}:|://){KEPT}+@"
_CREDENTIALS = re.compile(
    # the password reaches to the last @ of the line: it may hold one
    rf"{_REFERS}|(?P<user>{_USER}:)(?!PASSWORD@)(?:(?!{_REFERS}).)*@"
    rf"|(?P<at>://|\bhttps?:/)(?!PASSWORD@)(?:{REFERENCE}|[^:/@\s?#'\"])+@"
)
_PARTS = re.compile(
    rf"://(?:(?:{REFERENCE}|[^:/@?])*+:(?P<password>.+)@|(?P<token>(?:{REFERENCE}|[^:/@?])+)@)?(?P<rest>.*)"
)
_ANY = re.compile(REFERENCE)
_URI = re.compile(rf"(?:(?<!sqlite)://|\bhttps?:/)(?:{REFERENCE}|[^\s\"'`])*")
_PAIR = re.compile(rf"([?&]([^?&=]+)=)((?:{REFERENCE}|[^&])*)")
_SHOWN_VALUE = re.compile(rf"{KEPT}*|(?:PASSWORD|\*\*\*)\W*")
#: keys in the query of a URI whose values are shown; all others are hidden
HARMLESS = (
    *("application_name", "charset", "connect_timeout", "database", "dbname", "driver", "host", "mode", "options"),
    *("port", "schema", "ssl", "sslmode", "timeout", "uri", "user", "workflowtype"),
)


@dataclass(frozen=True)
class Problem:
    """One error of the user, as the command line, `--json` and a run's summary show it."""

    source: str  # what was typed, or a file and a line
    message: str  # the problem as one sentence in lower case, without a period; it names its subject
    help: str  # what to type or do: a verb first, backticks around what can be typed
    suggestions: tuple[str, ...] = ()  # texts for a shell, each of which replaces `source`, or a whole command
    notes: tuple[str, ...] = ()  # further facts
    code: str = "invalid-setting"  # a short stable name for the kind of error

    def __post_init__(self) -> None:
        object.__setattr__(self, "help", for_a_shell(self.help))
        object.__setattr__(self, "suggestions", tuple(map(for_a_shell, self.suggestions)))

    @classmethod
    def suggest(
        cls, source: str, message: str, suggestions: Iterable[str], otherwise: str = "", *, code: str = "bad-value"
    ) -> Problem:
        """Make an error whose help is up to three suggestions; without one, the help is `otherwise`."""
        offered = tuple(dict.fromkeys(suggestions))[:3]
        return cls(source, message, use(*offered) if offered else otherwise, offered, code=code)

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> Problem:
        """Return the error that `asdict()` was written of as JSON, where tuples are lists."""
        lists = {key: tuple(facts[key]) for key in ("suggestions", "notes")}
        return cls(**{**facts, **lists})

    def masked(self) -> Problem:
        """Return the same error without secrets."""
        hide = without_password
        lists = (tuple(map(hide, self.suggestions)), tuple(map(hide, self.notes)))
        return Problem(hide(self.source), hide(self.message), hide(self.help), *lists, code=self.code)

    def __str__(self) -> str:
        return render(self)


#: the colors of the first word of a line
_COLORS = {"error": 31, "warning": 33, "hint": 36, "help": 36, "note": 36}


def render(problem: Problem, *, kind: str = "error", in_color: bool = False) -> str:
    """Return an error (or a warning, or a hint) as lines of text without secrets and control characters."""
    lines = [(f"{kind}: ", problem.message), ("  --> ", problem.source), ("help: ", problem.help)]
    lines += [("note: ", note) for note in problem.notes]
    text = [_hang(head, harmless(without_password(text))) for head, text in lines if text]
    return "\n".join(map(colored, text) if in_color else text)


def _hang(head: str, text: str) -> str:
    return head + text.strip().replace("\n", "\n" + " " * len(head))


def colored(line: str) -> str:
    """Return a line with its first word in color: red for an error, yellow for a warning, cyan for advice."""
    kind, colon, rest = line.partition(":")
    return f"\033[1;{_COLORS[kind]}m{kind}{colon}\033[0m{rest}" if kind in _COLORS else line


def has_colors(stream: TextIO) -> bool:
    """Return whether a stream is a terminal that shows colors, and `NO_COLOR` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") not in ("dumb", "unknown")


def print_error(error: RunnerError) -> None:
    """Print every problem of an error to stderr, and their number where there are several."""
    in_color = has_colors(sys.stderr)
    blocks = [render(problem, in_color=in_color) for problem in error.problems]
    if (count := len(blocks)) > 1:
        last = f"error: {count} problems found; nothing was started"
        blocks.append(colored(last) if in_color else last)
    print("\n\n".join(blocks), file=sys.stderr)


def leave_unread() -> None:
    """Discard what is still printed, and what Python flushes at its end: the reader is gone."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


#: KEY=[...] and KEY={...} outside of quotes
_PATTERN = re.compile(r"(?<![\w.+~'\"])[+~]*[\w.@/]+=(?:\[(?:[^][']|\[[^][']*\])*\]|\{(?:[^{}']|\{[^{}']*\})*\})")


def for_a_shell(text: str) -> str:
    """Return a text with quotes around overrides that hold [ ] or { }: zsh and bash take them for patterns."""
    return _PATTERN.sub(r"'\g<0>'", text)


def use(*texts: str) -> str:
    """Return the help text that offers texts for a shell: overrides, or whole commands."""
    verb = "run" if texts[0].startswith(("python -m runner", "pip install")) else "use"
    *first, last = (f"`{text}`" for text in texts)
    return f"{verb} {', '.join(first)} or {last}" if first else f"{verb} {last}"


class RunnerError(Exception):
    """One or more errors of the user; the command line prints them without a traceback and exits with 2."""

    def __init__(self, *problems: Problem) -> None:
        super().__init__(*problems)
        self.problems = problems

    @classmethod
    def of(cls, source: str, message: str, help: str, *, code: str = "invalid-setting") -> Self:
        """Make the error of one problem."""
        return cls(Problem(source, message, help, code=code))

    @classmethod
    def suggest(
        cls, source: str, message: str, suggestions: Iterable[str], otherwise: str = "", *, code: str = "bad-value"
    ) -> Self:
        """Make the error of one problem whose help is suggestions, as `Problem.suggest` does."""
        return cls(Problem.suggest(source, message, suggestions, otherwise, code=code))

    def __str__(self) -> str:
        return "\n\n".join(map(str, self.problems))


def refuse(problems: Iterable[Problem]) -> None:
    """Raise a RunnerError with all of these problems; do nothing without any."""
    if every := tuple(problems):
        raise RunnerError(*every)


def at_once(*checks: Callable[[], Any]) -> list[Any]:
    """Make all checks and return their results.

    Raises:
        RunnerError: The problems of all checks, each once.
    """
    results: list[Any] = []
    problems: dict[Problem, None] = {}  # in their order
    for check in checks:
        try:
            results.append(check())
        except RunnerError as error:
            problems |= dict.fromkeys(error.problems)
    refuse(problems)
    return results


def as_facts(error: RunnerError) -> dict[str, list[dict[str, Any]]]:
    """Return all errors for a program."""
    old = [{"asked": each.source, "so": each.message, "write": each.help} for each in error.problems]
    facts = [asdict(each) | names for each, names in zip(error.problems, old, strict=True)]
    return {"faults": [{key: value for key, value in each.items() if key != "source"} for each in facts]}


def on_a_line(error: RunnerError) -> str:
    """Return all errors on one line, for a summary."""
    return without_password("; ".join(f"{each.message} ({each.source}); help: {each.help}" for each in error.problems))


def without_password(text: str, uri: str = "") -> str:
    """Hide every secret in a text, so that it can be printed, stored and tracked.

    Hidden are the credentials and query values of any URI, what `SECRETS` names, and the credentials of `uri` on their own.
    """
    known = dict(_secrets()) | {spelled: "***" for value in credentials(uri) for spelled in _spellings(value)}
    for secret in sorted(known, key=len, reverse=True):  # one may be part of another
        text = text.replace(secret, known[secret])
    return without_credentials(text)


def traceback_of(error: BaseException) -> str:
    """Return the traceback of an error without secrets."""
    return without_password("".join(traceback.format_exception(error)))


def without_credentials(text: str) -> str:
    """Hide the credentials and query values of the URIs in a text; references to a secret stay."""
    if ":/" not in text:
        return text

    def hide(match: re.Match[str]) -> str:
        user, at = match["user"], match["at"]
        return f"{user}***@" if user else f"{at}***@" if at else match[0]

    def hide_value(match: re.Match[str]) -> str:
        is_shown = match[2].lower() in HARMLESS or _SHOWN_VALUE.fullmatch(match[3])
        return match[0] if is_shown else f"{match[1]}***"

    return _URI.sub(lambda match: _PAIR.sub(hide_value, match[0]), _CREDENTIALS.sub(hide, text))


def credentials(uri: str) -> set[str]:
    """Return the secrets of a URI, as they are written and decoded, without those in its public parts."""
    if (match := _PARTS.search(uri)) is None:
        return set()
    pairs = _PAIR.findall(match["rest"]) if _URI.search(uri) else ()
    written = [match["password"] or match["token"] or ""]
    written += [each for _, key, each in pairs if key.lower() not in HARMLESS]
    values = {value for each in written for value in (each, unquote(each), unquote_plus(each)) if not _ANY.search(each)}
    public = without_credentials(uri)
    return {value for value in values if len(value) >= SHORTEST_SECRET and value not in public}


def _spellings(value: str) -> set[str]:
    return {value, quote(value), quote(value, safe=""), value.replace(":", "\\:")}  # the last one: as Hydra quotes


def _secrets() -> Iterator[tuple[str, str]]:
    for entry in os.environ.get(SECRETS, "").split(","):
        is_value = entry.startswith("=")
        value = unquote(entry[1:]) if is_value else os.environ.get(entry, "")
        if len(value) >= SHORTEST_SECRET:
            yield from ((spelled, "***" if is_value else f"<oc.env:{entry}>") for spelled in _spellings(value))


#: C0 without tab and line feed, DEL and C1: a terminal takes them for commands
CONTROLS = {code: f"\\x{code:02x}" for code in (*range(9), *range(11, 32), *range(127, 160))}


def harmless(text: str) -> str:
    r"""Return a text from anywhere as a terminal may show it: control characters are spelled out, \x1b for the escape."""
    return text.translate(CONTROLS)


def first_line(error: object) -> str:
    """Return the first line of an error or a text; an error's class where it has none."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def listed(names: Sequence[str], most: int = 10) -> str:
    """Join names by commas, and count those after the first `most`."""
    more = f" and {len(names) - most:,} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more


#: the directories of this package and of Python, which may be below the current one
NOT_OWN = (Path(__file__).parent, sysconfig.get_path("stdlib"), Path(os.__file__).parent)
#: what the user's code may raise, also by sys.exit()
CODE_ERRORS = (Exception, SystemExit)


def in_words(error: BaseException) -> str:
    """Return an error's class and text; sys.exit() has none, and would end the program, perhaps with success."""
    if isinstance(error, SystemExit):
        return f"SystemExit: it would end the program, with exit code {error.code or 0}"
    return f"{type(error).__name__}: {error}"


def own_line(error: BaseException) -> str:
    """Return the last line of the user's code in an error's traceback, e.g., " (mine.py:2)", or ""."""
    if isinstance(error, SyntaxError):
        return f" ({Path(error.filename or '?').name}:{error.lineno})"
    trace, line = error.__traceback__, ""
    while trace is not None:
        file = Path(trace.tb_frame.f_code.co_filename)
        is_others = "site-packages" in file.parts or any(file.is_relative_to(folder) for folder in NOT_OWN)
        if file.is_relative_to(Path.cwd()) and not is_others:
            line = f" ({file.name}:{trace.tb_lineno})"
        trace = trace.tb_next
    return line


def finite(value: Any) -> Any:
    """Return a value for JSON: NaN and inf become null, tuples lists, keys texts."""
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def nearest(text: str, choices: Iterable[str], *, cutoff: float = 0.76) -> list[str]:
    """Return the choices that `word` is certainly a misspelling of, the most similar first.

    Transposed letters count as similar at any length. cutoff: share of letters that must agree.
    """
    by_lower = {choice.lower(): choice for choice in choices}
    text = text.lower()
    hits = difflib.get_close_matches(text, by_lower, n=3, cutoff=cutoff)
    swapped = [choice for choice in by_lower if sorted(choice) == sorted(text)]
    return [by_lower[hit] for hit in dict.fromkeys([*hits, *swapped])]


def nearest_files(file: Path, is_wanted: Callable[[Path], bool]) -> list[Path]:
    """Return up to three files that a missing path may have meant: with similar names, in its directory or similar ones.

    Without a similar name, the first files of its directory.
    """
    folder = file.parent
    folders = [folder] if folder.is_dir() else []
    if not folders and folder.parent.is_dir():
        names = [each.name for each in folder.parent.iterdir() if each.is_dir()]
        folders = [folder.with_name(name) for name in nearest(folder.name, names)]
    files: list[Path] = []
    for near in folders:
        names = sorted(each.name for each in near.iterdir() if is_wanted(each))
        files += [near / name for name in nearest(file.name, names) or (names if near == folder else [])]
    return files[:3]


#: s3://bucket/key, also as a Path spells it; a drive of Windows has one letter
_ADDRESS = re.compile(r"(?P<scheme>[A-Za-z][\w+.-]+):/+(?P<rest>[^?]*).*")


def path_problems(key: str, path: str, *, is_written: bool = False) -> list[Problem]:
    """Return why a path names no file or directory of this machine; nothing where it can be one.

    is_written: The run's files go there.
    """
    if (address := _ADDRESS.match(path)) is not None:
        problem = f"{address['scheme'].lower()}:// is an address, and only files of this machine are read and written"
        name = Path(address["rest"]).name or "FILE"
        fix = f"copy it here, then use `{key}={name}`"
        if is_written:
            fix = f"use `{key}=PATH`, and copy it there afterwards"
        return [Problem(f"{key}={path}", problem, fix, code="bad-value")]
    try:
        mode = Path(path).expanduser().stat().st_mode
    except (OSError, RuntimeError, ValueError):  # who reads it reports that
        return []
    if is_written or stat.S_ISREG(mode) or stat.S_ISDIR(mode):
        return []
    problem = f"`{path}` is a pipe or a device, which can't be read twice"
    return [Problem(f"{key}={path}", problem, f"use `{key}=FILE`", code="bad-value")]


_NO_SUCH_DEVICE = re.compile(
    r"Torch not compiled with \w+ enabled|No CUDA GPUs|no NVIDIA driver|not linked with support for"
)


def moves_itself(error: BaseException) -> bool:
    """Return whether code asked torch for a device that this machine does not have, e.g., by `.cuda()`."""
    return bool(_NO_SUCH_DEVICE.search(str(error)))


#: the fix
NO_MOVES = "remove `.cuda()` and `.to(...)`: `device=` places the model and each batch"


def is_out_of_host_memory(error: BaseException) -> bool:
    match = re.search("can't allocate memory|can't start new thread|not enough memory", str(error))
    return isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and match is not None)


def is_full_disk(error: BaseException) -> bool:
    return isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT)


DELETED = "the run's directory was deleted or renamed while it trained; its points are kept at the old place"


class DeletedError(OSError):
    """A run's directory was deleted or renamed while it trained, or its journal was cut; what follows is still written."""

    def __init__(self, problem: str = DELETED) -> None:
        super().__init__(problem)

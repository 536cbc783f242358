"""A command, its options, and the arguments that its function takes. The commands of all packages are made of these."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from importlib import import_module
from typing import Any, cast

from runner.errors import RunnerError, path_problems, refuse

ANY_KEY = ("",)


@dataclass(frozen=True)
class Option:
    """A flag (`--bench`), a flag with a value (`--input FILE`) or a setting (`metric=NAME`) of one command."""

    name: str  # a setting's ends in =
    value: str = ""  # what the value is called in the help; "" for a flag without one
    help: str = ""
    read: Callable[[Option, str], Any] = lambda option, value: value
    default: Any = None
    is_required: bool = False

    @property
    def usage(self) -> str:
        return f"{self.name}{self.value}" if self.name.endswith("=") else f"{self.name} {self.value}".rstrip()


def number(least: int = 1, most: int | None = None) -> Callable[[Option, str], int]:
    """Return a reader of whole numbers."""

    def read(option: Option, value: str) -> int:
        if value.isdecimal() and least <= int(value) and (most is None or int(value) <= most):
            return int(value)
        numbers = f"{least} or more" if most is None else f"{least} to {most}"
        problem, way = f"`{option.name}` must be a whole number, {numbers}", max(least, option.default or 0)
        raise RunnerError.suggest(f"{option.name} {value}", problem, [f"{option.name} {way}"])

    return read


def amount(option: Option, value: str) -> float:
    """Read a number above 0."""
    with suppress(ValueError):
        if 0 < (number := float(value)) < float("inf"):
            return number
    problem, way = f"`{option.name}` must be a number above 0", f"{option.name} {option.default or 60:g}"
    raise RunnerError.suggest(f"{option.name} {value}", problem, [way])


def input_path(option: Option, value: str) -> str:
    """Read the path of a file of this machine."""
    refuse(path_problems(option.name, value))
    return value


def output_path(option: Option, value: str) -> str:
    """Read the path of a file to write."""
    refuse(path_problems(option.name, value, is_written=True))
    return value


Facts = Mapping[str, Any]
Function = Callable[["Arguments"], "int | Facts | tuple[int, Facts]"]


@dataclass(frozen=True)
class Command:
    """What a command is called, what it takes, and the function that runs it."""

    name: str  # the first argument of the command line
    group: str  # the heading in `--help`
    help: str  # one line: imperative, capital, no period, under 60 characters
    #: takes `Arguments`; returns the exit code, the result that `--json` prints, or both. MODULE:NAME is imported when the
    #: command runs ("": the function of cli/commands.py with the command's name)
    function: Function | str = ""
    values: str = ""  # the positional arguments in the help: `[RUN]` for one, `[DIR ...]` or `A B` for several
    options: tuple[Option, ...] = ()
    keys: tuple[str, ...] | None = None  # beginnings of the keys that it takes as overrides; None: no configuration
    hydra_flags: frozenset[str] = frozenset()
    composes: bool = False  # whether composing its overrides reports several values without -m, next to other errors
    details: str = ""  # more lines for `COMMAND --help` and the reference

    def find_function(self) -> Function:
        if not isinstance(self.function, str):
            return self.function
        module, _, name = (self.function or f"runner.cli.commands:{self.name.replace('-', '_')}").partition(":")
        return cast(Function, getattr(import_module(module), name))

    def option(self, name: str) -> Option | None:
        return next((option for option in self.options if option.name == name), None)

    @property
    def max_values(self) -> float:
        if not self.values:
            return 0
        return 1 if self.values.endswith("]") and " " not in self.values else float("inf")

    @property
    def usage(self) -> str:
        parts = ["python -m runner", self.name, self.values]
        parts += [option.usage if option.is_required else f"[{option.usage}]" for option in self.options]
        if self.keys:
            parts.append("[KEY=VALUE ...]" if self.keys == ANY_KEY or len(self.keys) > 1 else f"[{self.keys[0]}=...]")
        return " ".join(filter(None, parts))


@dataclass(frozen=True)
class Arguments:
    """The arguments of one command, checked."""

    command: Command
    words: list[str]  # as they were typed
    values: tuple[str, ...]  # positional: runs, sweeps, directories
    options: dict[str, Any]  # by name; the default of an option that was not typed
    flags: list[str]  # Hydra's
    overrides: list[str]
    is_json: bool = False  # whether only the result goes to stdout

    @property
    def run(self) -> str:
        """The run that is meant: `last` if none was typed."""
        return self.values[0] if self.values else "last"

    def __getitem__(self, option: str) -> Any:
        return self.options[option]

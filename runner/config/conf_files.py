"""Reports every error in a file of conf/ that Hydra refuses: each key with its line and the nearest valid key."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml
from hydra.errors import MissingConfigException

from runner.config import validate
from runner.config.compose import MisfitError
from runner.config.validate import Misfit
from runner.errors import Problem, first_line, nearest

#: how Hydra reports an error in a file's defaults
NO_SUCH_DEFAULT = re.compile(r"In '(?P<name>.*)': Could not override '(?P<group>.*)'\. No match in the defaults list")
#: and in those of a file without a package line, which are below the name of its group
WRONG_PACKAGE = re.compile(r"In '(?P<name>(?P<group>.+)/.*)': Could not override '[^@']*@(?P<package>[^']*)'")
#: and a key in a file
IN_A_FILE = re.compile(r"In '(?P<name>.*)': \w+ raised while composing config:\n(?P<problem>.*)", re.DOTALL)
QUOTES = "\"'"
OWN = "the arguments of a part are below " + ", ".join(validate.BUILT)


def problem(error: MisfitError, key: str, value: Any, kind: str | None) -> Problem:
    """Return the error of a value of a file that does not fit the schema. kind: the type of its key; None: no such key."""
    for file in error.files:
        inside = key.removeprefix(f"{file.package}.") if file.package else key
        if f"{file.package}.".startswith(f"{key}."):  # no key of the file has a place
            problem = f"the keys of this file are below `{file.package}`, and there is no key `{key}`: {OWN}"
            fix = f"write `# @package _global_` as its first line, or `{Path(file.name).parent}@model` in the defaults"
            return Problem(_shown_path(file.path), problem, fix, code="unknown-key")
        if (line := line_of(file.path.read_text(encoding="utf-8"), inside)) is not None:
            source = f"{as_yaml(inside, value)} in {_shown_path(file.path)}, line {line}"
            return _problem(error, file.package, source, inside, Misfit(key, value, kind))
    return _problem(error, "", as_yaml(key, value), key, Misfit(key, value, kind))


def defaults_fault(text: str, error: Exception) -> Problem | None:
    """Return the error in the defaults of the file that an override GROUP=OPTION chooses, or None."""
    group, _, option = text.lstrip("+").partition("=")
    chosen = f"{group.partition('@')[0]}/{option.strip(QUOTES)}"
    if isinstance(error, MissingConfigException) and error.missing_cfg_file not in (None, chosen):
        wanted, _, name = str(error.missing_cfg_file).rpartition("/")
        options = sorted(error.options or [])
        problem = f"`{wanted}` has no `{name}`; it has {', '.join(options)}" if options else f"conf/ has no {wanted}/"
        hits = " or ".join(f"`{wanted}: {hit}`" for hit in nearest(name, options) or options[:3])
        fix = f"write {hits}" if hits else f"add a file conf/{wanted}/{name}.yaml"
        return Problem(f"{wanted}: {name} in the defaults of {chosen}", problem, fix, code="unknown-option")
    told = WRONG_PACKAGE.match(str(error))
    if told and f"{told['package']}.".startswith(f"{told['group'].replace('/', '.')}."):
        problem = f"a file without a package line has its keys below `{told['group']}`, where no key is"
        fix = "write `# @package _global_` as its first line"
        return Problem(f"conf/{told['name']}.yaml", problem, fix, code="unknown-key")
    if told := IN_A_FILE.match(str(error)):
        fix = "correct that key; `--cfg hydra` prints those of Hydra"
        return Problem(f"conf/{told['name']}.yaml", first_line(told["problem"]), fix, code="bad-file")
    if told := NO_SUCH_DEFAULT.match(str(error)):
        problem = f"the defaults before it choose no `{told['group']}`, which it would override"
        fix = "use a group that `--info defaults` lists, or remove `override`"
        source = f"override {told['group']} in the defaults of {told['name']}"
        return Problem(source, problem, fix, code="unknown-option")
    return None


def line_of(text: str, key: str) -> int | None:
    """Return the line of a dotted key in a YAML text, from 1; None if it is not written as nested keys."""
    node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
    for word in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        found = [(name, value) for name, value in pairs if name.value == word]
        if not found:
            return None
        line, node = found[0][0].start_mark.line + 1, found[0][1]
    return line


def as_yaml(key: str, value: Any) -> str:
    """Return a dotted key as a line of YAML: train: {num_epochs: 5}."""
    first, _, rest = key.partition(".")
    return f"{first}: {{{as_yaml(rest, value)}}}" if rest else f"{first}: {_shown(value)}"


def _problem(error: MisfitError, package: str, source: str, inside: str, misfit: Misfit) -> Problem:
    key, value, kind = misfit
    if kind is not None:
        example = validate.EXAMPLES.get(kind.split("|")[0].strip(), "...")
        problem = validate.wrong_type(key, _shown(value), kind).message
        return Problem(source, problem, f"write `{as_yaml(inside, example)}`", code="bad-value")
    leaf, known = key.rpartition(".")[2], list(validate.all_keys(error.config))
    hits = [hit for hit in validate.suggest_keys(key, known) if nearest(leaf, [hit.rpartition(".")[2]], cutoff=0.7)]
    near = [f"`{as_yaml(hit.removeprefix(f'{package}.'), value)}`" for hit in hits if hit.startswith(package)]
    fix = f"write {' or '.join(near)}" if near else f"{validate.PRINTED}; {OWN}"
    return validate.unknown_key(source, key, fix)


def _shown_path(file: Path) -> str:
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _shown(value: Any) -> str:
    return "{...}" if isinstance(value, dict) else "null" if value is None else str(value)

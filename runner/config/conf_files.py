"""Reports every error in a file of conf/ that Hydra refuses: each key with its line and the nearest valid key."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from runner.config import validate
from runner.config.compose import WrongFile
from runner.config.identity import leaves
from runner.config.schema import Config
from runner.errors import Problem, nearest

#: how Hydra reports an error in a file's defaults
NO_SUCH_DEFAULT = re.compile(r"In '(?P<name>.*)': Could not override '(?P<group>.*)'\. No match in the defaults list")
#: and in those of a file without a package line, which are below the name of its group
WRONG_PACKAGE = re.compile(r"In '(?P<name>(?P<group>.+)/.*)': Could not override '[^@']*@(?P<package>[^']*)'")
QUOTES = "\"'"
OWN = "the arguments of a part are below " + ", ".join(validate.BUILT)


def file_problems(error: WrongFile, known: list[str]) -> list[Problem]:
    """Return every error in the keys of the file. known: the dotted keys of the configuration."""
    if f"{error.package}.".startswith(f"{error.key}."):  # no key of the file has a place
        return [_misplaced(error)]
    text = _text(error.file)
    keys = dict.fromkeys([_refused(key, value) for key, value in _leaves(text, error.package)])
    wrong = [found for found in keys if found is not None] or [(error.key, "...", None)]
    return [_problem(error, text, key, value, kind, known) for key, value, kind in wrong]


def defaults_fault(text: str, error: Exception) -> Problem | None:
    """Return the error in the defaults of the file that an override GROUP=OPTION chooses, or None."""
    from hydra.errors import MissingConfigException

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
        file = Path("conf", f"{told['name']}.yaml")
        return _without_package(file if file.is_file() else None, told["name"], told["group"])
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


def _problem(error: WrongFile, text: str, key: str, value: Any, kind: str | None, known: list[str]) -> Problem:
    inside = key.removeprefix(f"{error.package}.") if error.package else key
    line = line_of(text, inside)
    place = f"{_shown_path(error.file, error.name)}{f', line {line}' if line else ''}"
    asked = f"{as_yaml(inside, value)} in {place}"
    if kind is not None:
        example = validate.EXAMPLES.get(kind.split("|")[0].strip(), "...")
        problem = validate.wrong_type(key, _shown(value), kind).message
        return Problem(asked, problem, f"write `{as_yaml(inside, example)}`", code="bad-value")
    if key.startswith("hydra."):
        fix = "use a key that `--cfg hydra` prints"
        return Problem(asked, f"Hydra has no setting `{key}`", fix, code="unknown-key")
    leaf = key.rpartition(".")[2]
    hits = [hit for hit in validate.suggest_keys(key, known) if nearest(leaf, [hit.rpartition(".")[2]], cutoff=0.7)]
    near = [
        f"`{as_yaml(hit.removeprefix(f'{error.package}.'), value)}`" for hit in hits if hit.startswith(error.package)
    ]
    fix = f"write {' or '.join(near)}" if near else f"{validate.PRINTED}; {OWN}"
    return validate.unknown_key(asked, key, fix)


def _misplaced(error: WrongFile) -> Problem:
    group, _, name = error.name.rpartition("/")
    if error.package == group.replace("/", "."):
        return _without_package(error.file, error.name, error.package)
    lines = _text(error.parent_file).splitlines()
    line = next((number for number, text in enumerate(lines, start=1) if f"{group}@{error.package}" in text), None)
    asked = f"{group}@{error.package}: {name} in {_shown_path(error.parent_file, error.parent)}"
    asked += f", line {line}" if line else ""
    return Problem(asked, f"there is no key `{error.key}`: {OWN}", f"write `{group}@model: {name}`", code="unknown-key")


def _without_package(file: Path | None, name: str, package: str) -> Problem:
    problem = f"a file without a package line has its keys below `{package}`, where no key is"
    fix = "write `# @package _global_` as its first line"
    return Problem(_shown_path(file, name), problem, fix, code="unknown-key")


def _leaves(text: str, package: str) -> Iterator[tuple[str, Any]]:
    content = yaml.safe_load(text) or {}
    for name in content if isinstance(content, dict) else ():
        if name not in ("defaults", "hydra"):
            yield from leaves(content[name], f"{package}.{name}" if package else str(name))


def _refused(key: str, value: Any) -> tuple[str, Any, str | None] | None:
    node = value
    for word in reversed(key.split(".")):
        node = {word: node}
    try:
        OmegaConf.merge(OmegaConf.structured(Config), DictConfig(node))
    except ValidationError:
        return key, _shown(value), validate.kind_of(key)
    except OmegaConfBaseException as error:
        wrong = str(error.full_key or key)
        return (wrong, _shown(value), None) if wrong == key else (wrong, "{...}", None)
    return None


def _shown_path(file: Path | None, name: str) -> str:
    if file is None:
        return name
    here = Path.cwd()
    return str(file.relative_to(here)) if file.is_relative_to(here) else str(file)


def _text(file: Path | None) -> str:
    return file.read_text(encoding="utf-8") if file is not None else ""


def _shown(value: Any) -> str:
    return "{...}" if isinstance(value, dict) else "null" if value is None else str(value)

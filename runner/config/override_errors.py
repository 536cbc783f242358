"""Reports every override, and every line of a file of conf/, that Hydra or the schema refuses, and what was probably meant."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import other_names, validate
from runner.config.allowed import PARTS
from runner.config.checks import argument_problems
from runner.config.compose import CONF, NEEDS_SWEEP, REFUSALS, CheckedLoader, Compose, Composed, MisfitError
from runner.config.identity import as_text, key_of, quoted
from runner.config.instantiate import BUILT, locate, option_files
from runner.config.schema import KINDS, SearchKeys, find_key, keys
from runner.config.validate import Misfit
from runner.errors import Problem, RunnerError, first_line, nearest

#: how Hydra reports an error in a file
FILE_ERROR = re.compile(r"In '(?P<name>[^']*)': (?:\w+ raised while composing config:\n)?(?P<problem>.*)", re.DOTALL)
PACKAGE = "write `# @package _global_` as its first line: without it, its keys are below the name of its group"
PLAIN_KEY = re.compile(r"[\w./:-]+", re.ASCII)  # without quotes
QUOTE = '"'  # of a value; a shell gets the override in '...'
QUOTES = "\"'"
SEVERAL = re.compile(r"(?:\w+\()*(?:choice|range|glob|interval)\(")  # functions that make several values


@contextmanager
def explained(
    overrides: Sequence[str],
    *,
    compose: Compose,
    check: Callable[[DictConfig], object],
    errors: tuple[type[Exception], ...] = REFUSALS,
) -> Iterator[None]:
    """Raise explain() of an error that composing these overrides raises."""
    try:
        yield
    except BrokenPipeError:  # by `... | head`
        raise
    except errors as error:
        raise explain(error, list(overrides), compose=compose, check=check) from None


def explain(
    error: Exception, overrides: list[str], *, compose: Compose, check: Callable[[DictConfig], object]
) -> RunnerError:
    """Return every error of a composition that failed. Hydra names only the first; this tries each override separately.

    Args:
        error: The error of the composition.
        overrides: Its overrides.
        compose: Composes a list of overrides, in about 0.1 s.
        check: Raises a RunnerError with the errors of the valid overrides.
    """
    if isinstance(error, RunnerError):
        return error
    if isinstance(error, MisfitError) and not any(map(has_several, overrides)):
        problems = _misfit_problems(error, error.overrides)
        return _with_errors_of(check, error.config, problems, {each.key for each in error.misfits})
    try:
        cfg = compose([])
    except REFUSALS as refused:
        return RunnerError(*_problems("", refused, None))
    problems = []
    accepted: list[str] = []
    refused_keys: set[str] = set()
    is_one_run = str(error).startswith(NEEDS_SWEEP)
    for text in sorted(overrides, key=_depth):
        key, values = _bare_key(text), list(singles(text))
        is_of_hydra = key.startswith("hydra")
        if key.partition(".")[0] in refused_keys and not is_of_hydra:
            continue
        if len(values) > 1 and (is_one_run or is_of_hydra):
            what, fix = f"`{key}` is the same for all jobs of a sweep", f"set `{key}` to one value"
            problems.append(Problem(text, what, fix, code="bad-value") if is_of_hydra else ambiguous(text, cfg=cfg))
            is_group = OmegaConf.is_dict(validate.value(cfg, key)) and not is_of_hydra
            values = values[:1] if is_group else []
        for single in values:
            try:
                cfg = compose([*accepted, single])
                accepted.append(single)
            except REFUSALS as refused:
                typed = single if _bare_key(single) in validate.all_keys(cfg) else text
                problems += _problems(typed, refused, cfg)
                refused_keys.add(_bare_key(single))
                break
    if not problems and isinstance(error, MisfitError):  # of a sweep's job
        problems = _misfit_problems(error, error.overrides)
    result = _with_errors_of(check, cfg, problems, refused_keys)
    return result if result.problems else RunnerError(_broken_file(error))


def _with_errors_of(
    check: Callable[[DictConfig], object], cfg: DictConfig, problems: Iterable[Problem], refused_keys: set[str]
) -> RunnerError:
    every = dict.fromkeys(problems)  # in order
    try:
        check(cfg)
    except RunnerError as more:
        is_new = (_bare_key(each.source.removeprefix("no ")) not in refused_keys for each in more.problems)
        every |= dict.fromkeys(each for each, new in zip(more.problems, is_new, strict=True) if new)
    return RunnerError(*every)


def _depth(text: str) -> int:
    key = key_of(text)  # keys depend on groups and targets
    return 2 if "." in key and not key.endswith("._target_") else int("." in key)


def _bare_key(text: str) -> str:
    return key_of(text).split("@")[0]


def _parsed(text: str) -> Override | None:
    try:  # glob(*) needs a loader
        (override,) = OverridesParser.create(config_loader=CheckedLoader()).parse_overrides([text])
        return override
    except (HydraException, ValueError):
        return None


def has_several(text: str) -> bool:
    """Return whether an override has several values, one for each job of a sweep."""
    if text.startswith(("sweep.zip={", "sweep.zip=[")):
        return True
    override = _parsed(text) if re.search("[,(]", text) else None
    return override is not None and override.is_sweep_override()


def singles(text: str) -> Iterator[str]:
    """Yield one override for each value of an override of a sweep; the ends of an interval."""
    override = _parsed(text)
    if override is None or not override.is_sweep_override():
        yield text
        return
    head, value = text[: text.index("=") + 1], override.value()
    values = (value.start, value.end) if isinstance(value, IntervalSweep) else override.sweep_string_iterator()
    yield from (f"{head}{each}" for each in values)


def ambiguous(text: str, *, takes_sweep: bool = True, cfg: DictConfig | None = None) -> Problem:
    """Return the error of several values without -m.

    Args:
        text: The override.
        takes_sweep: Whether the command takes -m.
        cfg: The configuration, by whose targets suggestions are checked.
    """
    key, _, value = text.partition("=")
    typed = re.sub(r"(?<=,)(?=\d)", "cuda:", text) if key == "device" else text
    each_fits = all(_fits(_bare_key(text), single.partition("=")[2], cfg) for single in singles(typed))
    ways = [f"-m {shlex.quote(typed)}"] if takes_sweep and each_fits else []
    is_written = not SEVERAL.match(value) and key != "sweep.zip"
    known = find_key(_bare_key(text))
    kind = known.kind if known else "Any"
    if re.fullmatch(r"-?0,\d+", value) and kind.startswith(("float", "Any")):
        ways = [f"{key}={value.replace(',', '.')}", *ways]
    elif kind == "Any" and is_written and value.strip(",") and _fits(_bare_key(text), f"[{value}]", cfg):
        ways.append(shlex.quote(f"{key}=[{value}]"))
    what = "a comma between values means" if is_written else "this value means"
    takes = "that takes `-m`" if takes_sweep else "this is one run"
    return Problem.suggest(text, f"{what} a run for each of them, and {takes}", ways, "use one value")


def _problems(text: str, error: Exception, cfg: DictConfig | None) -> list[Problem]:
    """Return the errors of one override; of the main file for an empty text."""
    if isinstance(error, RunnerError):
        return list(error.problems)
    if isinstance(error, MisfitError):
        return _misfit_problems(error, [text] if text else [])
    if cfg is None or hasattr(_innermost(error), "problem_mark"):
        return [_broken_file(error)]
    return [_file_choice_problem(text, error) or _problem(text, error, cfg)]


def _problem(text: str, error: Exception, cfg: DictConfig) -> Problem:
    override, bare, value = _parsed(text), _bare_key(text), text.partition("=")[2]
    known, choices = [*validate.all_keys(cfg)], cfg.hydra.runtime.choices
    is_group = bare in choices  # perhaps without an option
    if override is None and PLAIN_KEY.fullmatch(bare):
        way = shlex.quote(f"{key_of(text)}={quoted(value, QUOTE)}")
        return Problem.suggest(text, "Hydra reads this value in quotes only", [way])
    if override is None:
        return _unknown_key(text, bare, cfg)
    if override.is_sweep_override():
        return ambiguous(text, cfg=cfg)
    if isinstance(error, MissingConfigException):
        return _missing_option(text, bare, value, error.options)
    if override.is_delete() and bare not in known:
        return validate.unknown_key(text, bare, "leave it out")
    if override.is_delete() and validate.value(cfg, bare) is None:
        return Problem(text, f"`{bare}` is null already", "leave it out", code="bad-value")
    if override.is_add() and (bare in known or is_group):
        way = shlex.quote(f"{bare}={value}")
        return Problem.suggest(text, f"`{bare}` exists already, and + only adds new keys", [way])
    if is_group and not (override.is_delete() or isinstance(override.value(), str | list)):
        ways = [f"{bare}={name}" for name in [choices[bare] or next(iter(option_files(bare)), None)] if name]
        return Problem.suggest(text, f"`{bare}` needs the name of an option", ways)
    if (bare not in known and not is_group) or override.package is not None:
        return _unknown_key(text, bare, cfg)
    cause = f" {first_line(error.__cause__)}" if error.__cause__ is not None else ""
    return Problem(text, f"{first_line(error)}{cause}", f"set `{bare}` to another value", code="bad-value")


def _misfit_problems(error: MisfitError, overrides: Sequence[str]) -> list[Problem]:
    problems = []
    options = error.config.hydra.runtime.choices
    values = [text for text in overrides if options.get(_bare_key(text)) is None or "={" in text]
    for misfit in error.misfits:
        key, value, kind = misfit
        typed = [text for text in values if f"{key}.".startswith(f"{_bare_key(text)}.")]
        typed = typed or [text for text in values if _bare_key(text).startswith(f"{key}.")]
        if not typed:
            problems.append(_file_problem(error, misfit))
        elif kind is not None:
            shown = typed[-1].partition("=")[2] if _bare_key(typed[-1]) == key else str(value)
            problems.append(replace(validate.wrong_type(key, shown, kind), source=typed[-1]))
        else:
            problems.append(_unknown_key(typed[-1], key, error.config))
    return list(dict.fromkeys(problems))


def _unknown_key(text: str, key: str, cfg: DictConfig) -> Problem:
    bare, value = _bare_key(text), text.partition("=")[2]
    if bare == "tuned":  # a group of files that `tune` writes
        fix = f"run `python -m runner tune --name {value}` with the same overrides, which writes one"
        return Problem(text, "the current directory has no conf/tuned", fix, code="unknown-option")
    if bare in (f"hydra.sweeper.{name}" for name in keys(SearchKeys)):
        problem = "this setting belongs to a search, and this sweep is a grid"
        return Problem.suggest(text, problem, [f"hydra/sweeper=optuna {text}"], code="conflict")
    if bare != key and key.startswith(f"{bare}."):  # in a mapping
        hits = [f"`{hit}`" for hit in other_names.suggest_keys(key, [*validate.all_keys(cfg)])]
        return validate.unknown_key(text, key, f"use {' or '.join(hits)}" if hits else validate.PRINTED)
    values = [single.partition("=")[2] for single in singles(text)]
    hits = suggestions(bare, values, cfg) if "(" not in value else []
    otherwise = "leave it out; `--cfg job` prints the keys"
    groups = [each for each in other_names.suggest_keys(bare, [*cfg]) if option_files(each)] if "." not in bare else []
    if groups and not hits:
        otherwise = f"use `{groups[0]}=OPTION` with one of {', '.join(option_files(groups[0]))}"
    return validate.unknown_key(text, bare, otherwise, hits)


def suggestions(key: str, values: list[str], cfg: DictConfig) -> list[str]:
    """Return what an unknown key certainly means, as it can be typed, with valid values. values: those that were typed."""
    if ways := other_names.overrides_for(key, ",".join(values)):
        return ways
    known = [name for name in validate.all_keys(cfg) if name.startswith("hydra.") == key.startswith("hydra.")]
    known = [name for name in known if not name.startswith("facts.")]
    more = [name for name in other_names.keys_for(key) if name in other_names.WITH]
    for hit in other_names.suggest_keys(key, known) or more:
        is_group = "." not in hit and OmegaConf.is_dict(validate.value(cfg, hit))
        option = other_names.WITH.get(hit, "") if hit not in known else ""
        way = _with_option(hit, values, cfg) if is_group else _with_value(hit, values, _with_file(cfg, option))
        ways += [f"{option} {way}".strip()] if way else []
    return ways[:3]


def _with_file(cfg: DictConfig, option: str) -> DictConfig:
    """Return the configuration, or only that of the option's file."""
    group, _, name = option.partition("=")
    return OmegaConf.create({group: OmegaConf.load(option_files(group)[name])}) if option else cfg


def _with_value(key: str, texts: list[str], cfg: DictConfig) -> str | None:
    """KEY=VALUE for a shell: with the values that were typed if they fit the key, else with a valid one; None without one."""
    example, known, present = "0.001" if key == "optimizer.lr" else "", find_key(key), validate.value(cfg, key)
    if present is not None:
        example = "" if OmegaConf.is_dict(present) or present == [] else as_text(present)
    elif known is not None:
        example = known.example
    texts = [other_names.value_for(key, text) for text in texts]
    if example.startswith("["):
        texts = [f"[{text}]" if text.isdecimal() else text for text in texts]
    if not all(text and _fits(key, text, cfg) for text in texts):
        texts = [example] if example else []
    return shlex.quote(f"{key}={','.join(texts)}") if texts else None


def _fits(key: str, text: str, cfg: DictConfig | None) -> bool:
    """Return whether a key takes a value as it was typed, as far as that is known without building anything."""
    group, _, name = key.partition(".")
    if key in BUILT or cfg is None:
        return True
    if key == "device":
        plain = text.replace("\\", "")  # Hydra escapes a colon
        return re.fullmatch(r"auto|cpu|mps|all|(cuda|xpu)(:\d+)?|\[.*\]", plain) is not None
    try:
        made: Any = OmegaConf.to_container(OmegaConf.from_dotlist([f"x={text}"]))
        typed = made["x"]
        if (known := find_key(key)) is not None:
            return known.allows(known.typed(typed))
    except (OmegaConfBaseException, yaml.YAMLError, TypeError, ValueError):
        return False
    target, present = validate.value(cfg, f"{group}._target_"), validate.value(cfg, key)
    if target in PARTS:
        return not argument_problems(locate(target), {name: typed}, group)
    if type(present) in (int, float):
        return type(typed) in (int, float) and typed >= 0
    return not OmegaConf.is_dict(present) and (isinstance(typed, list) or not OmegaConf.is_list(present))


def _with_option(group: str, values: list[str], cfg: DictConfig) -> str | None:
    options, present = option_files(group), cfg.hydra.runtime.choices.get(group)
    meant = [_option(group, value, options) for value in values] if any(values) else [present]
    return f"{group}={','.join(filter(None, meant))}" if all(meant) else None


def _option(group: str, value: str, options: Iterable[str]) -> str | None:
    ours = other_names.value_for(group, value)
    if ours.partition(" ")[0] in options:
        return ours
    digits = re.sub(r"\D", "", value)
    return next((hit for hit in nearest(value, options) if re.sub(r"\D", "", hit) == digits), None)


def _missing_option(text: str, group: str, value: str, options: Sequence[str] | None, between: str = "=") -> Problem:
    own = f"add your own file conf/{group}/{value}.yaml"
    if group in ("hydra/launcher", "hydra/sweeper"):
        options = [option for option in options or () if option != "basic"]  # a sweep refuses Hydra's own
    if not options:
        return Problem(text, f"the group `{group}` does not exist or has no file", own, code="unknown-option")
    problem = f"`{group}` has no option `{value}`; it has {', '.join(sorted(options))}"
    if group == "data" and re.sub(r"\W|_", "", value.lower()) in other_names.ELSEWHERE:
        fix = "download it, then use `data=images data.path=FOLDER` or `data=huggingface data.path=NAME`"
        return Problem(text, problem, fix, code="unknown-option")
    ways = [f"{group}{between}{meant}"] if (meant := _option(group, value, options)) else []
    fix = f"use {f'`{ways[0]}`' if ways else 'one of these'}, or {own}"
    return Problem(text, problem, fix, tuple(ways) if between == "=" else (), code="unknown-option")


def _file_choice_problem(text: str, error: Exception) -> Problem | None:
    """Return the error in the file that an override GROUP=OPTION chooses, or None."""
    group, _, option = text.lstrip("+").partition("=")
    chosen = f"{group.partition('@')[0]}/{option.strip(QUOTES)}"
    if isinstance(error, MissingConfigException):
        if error.missing_cfg_file in (None, chosen):
            return None
        wanted, _, name = str(error.missing_cfg_file).rpartition("/")
        return _missing_option(f"{wanted}: {name} in the defaults of {chosen}", wanted, name, error.options, ": ")
    if (match := FILE_ERROR.match(str(error))) and "/" in match["name"]:
        source, problem = f"conf/{match['name']}.yaml", first_line(match["problem"])
        return Problem(source, problem, f"correct it, or {PACKAGE}", code="bad-file")
    return None


def _file_problem(error: MisfitError, misfit: Misfit) -> Problem:
    """Return the error of a value of a file that does not fit the schema."""
    key, value, kind = misfit
    source, leaf = key, key.rpartition(".")[2]
    for file in error.files:
        if f"{file.package}.".startswith(f"{key}."):  # no key of the file has a place
            return validate.unknown_key(_shown_path(file), key, PACKAGE)
        text = file.path.read_text(encoding="utf-8")
        if (line := line_of(text, key.removeprefix(f"{file.package}."))) is not None:
            source = f"{key} in {_shown_path(file)}, line {line}"
            break
    if kind is not None:
        fix = f"write `{leaf}: {KINDS.get(kind.split(' ')[0], ('', '...'))[1]}`"
        return replace(validate.wrong_type(key, str(value), kind), source=source, help=fix, suggestions=())
    known = [*validate.all_keys(error.config)]
    hits = [hit for hit in other_names.suggest_keys(key, known) if nearest(leaf, [hit.rpartition(".")[2]], cutoff=0.7)]
    fix = f"write {' or '.join(f'`{hit}`' for hit in hits)}" if hits else f"{validate.PRINTED}; {validate.BELOW}"
    return validate.unknown_key(source, key, fix)


def line_of(text: str, key: str) -> int | None:
    """Return the line of a dotted key in a YAML text, from 1; None if it is not written as nested keys."""
    node, line = yaml.compose(text, Loader=yaml.SafeLoader), None
    for part in key.split("."):
        pairs = node.value if isinstance(node, yaml.MappingNode) else []
        named = [(name, value) for name, value in pairs if name.value == part]
        if not named:
            return None
        line, node = named[0][0].start_mark.line + 1, named[0][1]
    return line


def _shown_path(file: Composed) -> str:
    here = Path.cwd()
    return str(file.path.relative_to(here)) if file.path.is_relative_to(here) else str(file.path)


def _broken_file(error: Exception) -> Problem:
    if isinstance(error, MissingConfigException):
        name = str(error.missing_cfg_file)
        there = [file.stem for place in (Path("conf"), CONF) for file in place.glob("*.yaml")]
        options = ", ".join(error.options or dict.fromkeys(there))
        problem = f"the search path has no such file (options: {options})"
        otherwise = "use a name on the path that `--info searchpath` prints, or `-cd FOLDER` for its directory"
        ways = [f"-cn {hit}" for hit in nearest(name, there)]
        return Problem.suggest(f"the configuration {name}", problem, ways, otherwise, code="missing-file")
    cause = _innermost(error)
    mark: Any = getattr(cause, "problem_mark", None)
    where = f" in {mark.name}, line {mark.line + 1}" if mark is not None else ""
    problem = getattr(cause, "problem", None) or first_line(cause)
    kind = "YAML can't be read" if mark is not None else type(cause).__name__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        where += f" at {cause.full_key}"
    fix = "correct that line, then run the same command"
    return Problem("the configuration's files", f"{kind}{where}: {problem}", fix, code="bad-file")


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error

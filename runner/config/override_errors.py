"""Reports every override that Hydra refuses, with the reason and what was probably meant."""

from __future__ import annotations

import itertools
import re
import shlex
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import conf_files, other_names, validate
from runner.config.compose import CONF, OF_ONE_RUN, CheckedLoader, Compose, MisfitError
from runner.config.identity import as_read, key_of, quoted
from runner.config.instantiate import option_files
from runner.errors import Problem, RunnerError, first_line, nearest

#: how Hydra's grammar reports errors
SYNTAX = ("mismatched", "extraneous", "token recognition", "no viable alternative", "missing ")
UNREAD_LETTERS = "LexerNoViableAltException"
#: a key without quotes
PLAIN_KEY = re.compile(r"[\w./:-]+", re.ASCII)
MARK = '"'  # the quote of a value; a shell gets the override in '...'
SEVERAL = re.compile(r"(?:\w+\()*(choice|range|glob|interval)\(")  # functions that make several values
WHOLE = re.compile(r"['\"]|\$\{")  # a value with a quote or a reference is quoted as a whole


def is_about_composition(error: Exception) -> bool:
    """Return whether an error comes from Hydra, OmegaConf or YAML."""
    return isinstance(error, HydraException | OmegaConfBaseException) or hasattr(_innermost(error), "problem_mark")


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
        found = _misfit_problems(error, error.overrides, compose)
        return _with_errors_of(check, error.config, found, {each.key for each in error.misfits})
    try:
        cfg = compose([])
    except RunnerError as refused:
        return refused
    except MisfitError as misfit:
        return RunnerError(*_misfit_problems(misfit, [], compose))
    except Exception as broken:
        return RunnerError(_broken_files(broken))
    problems: dict[Problem, None] = {}  # in order
    accepted: list[str] = []
    refused_keys: set[str] = set()
    is_one_run = str(error).startswith(OF_ONE_RUN)
    for text in sorted(overrides, key=_depth):
        is_of_hydra = text.lstrip("+").startswith("hydra")
        if not is_of_hydra and key_of(text).partition(".")[0] in refused_keys:
            continue
        singles = list(_singles(text))
        if is_of_hydra and len(singles) > 1:
            problems[_several_for_hydra(text)] = None
            continue
        if is_one_run and len(singles) > 1:
            problems[ambiguous(text)] = None
            singles = singles[: OmegaConf.is_dict(validate.value(cfg, _bare_key(text)))]  # one option of a group
        for single in singles:
            try:
                cfg = compose([*accepted, single])
                accepted.append(single)
            except Exception as refused:
                is_key = _bare_key(single) in validate.all_keys(cfg)
                problems |= dict.fromkeys(_problems(single if is_key else text, refused, cfg, compose))
                refused_keys.add(_bare_key(single))
                break
    if not problems and isinstance(error, MisfitError):  # of a sweep's job
        problems = dict.fromkeys(_misfit_problems(error, error.overrides, compose))
    result = _with_errors_of(check, cfg, problems, refused_keys)
    return result if result.problems else RunnerError(_broken_files(error))


def _with_errors_of(
    check: Callable[[DictConfig], object], cfg: DictConfig, problems: Iterable[Problem], refused_keys: set[str]
) -> RunnerError:
    found = dict.fromkeys(problems)
    try:
        check(cfg)
    except RunnerError as more:
        is_new = [_bare_key(each.source.removeprefix("no ")) not in refused_keys for each in more.problems]
        found |= dict.fromkeys(itertools.compress(more.problems, is_new))
    return RunnerError(*found)


def _misfit_problems(error: MisfitError, overrides: Sequence[str], compose: Compose) -> list[Problem]:
    found: dict[Problem, None] = {}
    options = error.config.hydra.runtime.choices
    values = [text for text in overrides if options.get(_bare_key(text)) is None or "={" in text]
    for key, value, kind in error.misfits:
        typed = [text for text in values if f"{key}.".startswith(f"{_bare_key(text)}.")]
        typed = typed or [text for text in values if _bare_key(text).startswith(f"{key}.")]
        if not typed:
            found[conf_files.problem(error, key, value, kind)] = None
        elif kind is not None:
            found[_wrong_value(typed[-1], key, value, kind)] = None
        else:
            found[_unknown_key(typed[-1], key, error.config, compose)] = None
    return list(found)


def _depth(text: str) -> int:
    key = key_of(text)  # keys depend on groups and targets
    return 2 if "." in key and not key.endswith("._target_") else int("." in key)


def _several_for_hydra(text: str) -> Problem:
    key, _, values = text.lstrip("+").partition("=")
    is_param = key.startswith("hydra.sweeper.params.")  # the sweeper reads its text
    ways = [shlex.quote(f'++{key}="{values}"')] if is_param else []
    return Problem.suggest(text, f"`{key}` is the same for all jobs of a sweep", ways, f"set `{key}` to one value")


@contextmanager
def explained(overrides: Sequence[str], *, compose: Compose, check: Callable[[DictConfig], object]) -> Iterator[None]:
    """Raise explain() of an error that composing these overrides raises."""
    try:
        yield
    except BrokenPipeError:  # by `... | head`
        raise
    except Exception as error:
        raise explain(error, list(overrides), compose=compose, check=check) from None


def _bare_key(text: str) -> str:
    return key_of(text).split("@")[0]


def _problems(text: str, error: Exception, cfg: DictConfig, compose: Compose) -> list[Problem]:
    if isinstance(error, RunnerError):
        return list(error.problems)
    if isinstance(error, MisfitError):
        return _misfit_problems(error, [text], compose)
    return [conf_files.defaults_fault(text, error) or _problem(text, error, cfg, compose)]


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


def _singles(text: str) -> Iterator[str]:
    """One override for each value of an override of a sweep; the ends of an interval."""
    override = _parsed(text)
    if override is None or not override.is_sweep_override():
        yield text
        return
    head, value = text[: text.index("=") + 1], override.value()
    if isinstance(value, IntervalSweep):
        yield from (f"{head}{value.start}", f"{head}{value.end}")
    else:
        yield from (head + value for value in override.sweep_string_iterator())


def ambiguous(text: str, *, takes_sweep: bool = True) -> Problem:
    """Return the error of several values without -m. takes_sweep: Whether the command takes -m."""
    key, _, value = text.partition("=")
    if not value.strip(","):
        way = shlex.quote(f"{key}={quoted(value, MARK)}")
        return Problem.suggest(text, "a single comma as the value needs quotes", [way])
    takes, otherwise = "that takes `-m`" if takes_sweep else "this is one run", "use one value"
    if (several := SEVERAL.match(value)) or key == "sweep.zip":
        what = f"`{several[1]}(...)` makes" if several else "values that go together make"
        ways = [f"-m {shlex.quote(text)}"] if takes_sweep else []
        return Problem.suggest(text, f"{what} several runs, and {takes}", ways, otherwise)
    values, kind = value.split(","), validate.kind_of(_bare_key(text)) or "Any"
    if key.startswith("device"):
        values = [f"cuda:{item}" if item.isdigit() else item for item in values]
    ways = [f"-m {key}={','.join(values)}"] if takes_sweep else []
    if re.fullmatch(r"-?0,\d+", value) and kind.startswith(("float", "Any")):
        ways = [f"{key}={value.replace(',', '.')}", *ways]
    elif kind == "Any":  # the key may take a list
        ways.append(shlex.quote(f"{key}=[{','.join(values)}]"))
    return Problem.suggest(text, f"a comma between values means a run for each of them, and {takes}", ways, otherwise)


def _problem(text: str, error: Exception, cfg: DictConfig, compose: Compose) -> Problem:
    key, _, value = text.partition("=")
    bare, message, cause = _bare_key(text), str(error), error.__cause__
    if "group override must be" in message:
        present = cfg.hydra.runtime.choices.get(bare)
        return Problem.suggest(text, f"`{bare}` needs the name of an option", [f"{bare}={present}"])
    if key.startswith("~") and "does not exist" in message:
        if bare in validate.all_keys(cfg):
            return Problem(text, f"`{bare}` is null already", f"leave it out, or use `{bare}=null`", code="bad-value")
        return validate.unknown_key(text, bare, "leave it out")
    if hasattr(_innermost(error), "problem_mark"):
        return _broken_files(error)
    if "Ambiguous value" in message or (value and not value.strip(",")):
        return ambiguous(text)
    if isinstance(error, MissingConfigException) and error.options is not None:
        return _missing_option(text, bare, value, list(error.options))
    if key.startswith("+") and any(
        part in message for part in ("Could not append", "Multiple values", "Error merging", "already")
    ):
        way = shlex.quote(f"{bare}={value}")
        return Problem.suggest(text, f"`{bare}` exists already, and + only adds new keys", [way])
    if message.startswith(UNREAD_LETTERS):
        if PLAIN_KEY.fullmatch(bare):
            return Problem.suggest(text, "Hydra reads such letters in quotes only", [_in_quotes(key, value)])
        return _unknown_key(text, bare, cfg, compose)
    if "Could not" in message or "Key '" in message:
        return _unknown_key(text, bare, cfg, compose)
    if isinstance(error, HydraException) and any(part in message for part in SYNTAX):
        problem = "Hydra can't read the value: " + " ".join(message.splitlines()[0].split())
        return Problem.suggest(text, problem, [shlex.quote(f"{key}={quoted(value, MARK)}")])
    inner = first_line(cause) if cause is not None and str(cause) else ""
    problem = " ".join(f"{message.splitlines()[0] if message else type(error).__name__} {inner}".split())
    return Problem(text, problem, f"set `{key}` to another value", code="bad-value")


def _unknown_key(text: str, key: str, cfg: DictConfig, compose: Compose) -> Problem:
    bare, value = _bare_key(text), text.partition("=")[2]
    if bare == "tuned":  # a group of files that `tune` writes
        fix = f"run `python -m runner tune --name {value}` with the same overrides, which writes one"
        return Problem(text, "the current directory has no conf/tuned", fix, code="unknown-option")
    if bare.startswith("hydra.sweeper."):
        with suppress(HydraException, OmegaConfBaseException, MisfitError):
            compose(["hydra/sweeper=optuna", text])
            problem = "this setting belongs to a search, and this sweep is a grid"
            return Problem.suggest(text, problem, [f"hydra/sweeper=optuna {text}"], code="conflict")
    if bare != key and key.startswith(f"{bare}."):
        known = [each for each in validate.all_keys(cfg) if each.rpartition(".")[0] == key.rpartition(".")[0]]
        return validate.unknown_key(text, key, f"use one of {', '.join(known)}")
    values = [single.partition("=")[2] for single in _singles(text)]
    hits = suggestions(bare, values, cfg, compose) if "(" not in value else []
    otherwise = "leave it out; `--cfg job` prints the keys"
    groups = [] if hits or "." in bare else [each for each in validate.suggest_keys(bare, [*cfg]) if option_files(each)]
    if groups:
        otherwise = f"use `{groups[0]}=OPTION` with one of {', '.join(option_files(groups[0]))}"
    return validate.unknown_key(text, bare, otherwise, hits)


def suggestions(key: str, values: list[str], cfg: DictConfig, compose: Compose) -> list[str]:
    """Return what an unknown key certainly means, as it can be typed, with valid values. values: those that were typed."""
    if found := other_names.overrides_for(key, ",".join(values)):
        return found
    known = [name for name in validate.all_keys(cfg) if name.startswith("hydra.") == key.startswith("hydra.")]
    known = [name for name in known if not name.startswith("facts.")]
    hits = validate.suggest_keys(key, known) or [
        name for name in other_names.keys_for(key) if name in (*other_names.WITH, "hydra.run.dir")
    ]
    ways = []
    for hit in hits:
        more = other_names.WITH.get(hit, "") if hit not in known else ""
        has = compose(more.split()) if more else cfg
        is_group = "." not in hit and OmegaConf.is_dict(validate.value(cfg, hit))
        way = _with_option(hit, values, has) if is_group else validate.with_value(has, hit, values)
        ways += [f"{more} {way}".strip()] if way else []
    return ways[:3]


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


def _in_quotes(key: str, value: str) -> str:
    if WHOLE.search(value):
        return shlex.quote(f"{key}={quoted(value, MARK)}")
    between = r"[^][{},:]+" if value.startswith(("[", "{")) else r"[^,]+"  # a list or a mapping; values of a sweep
    within = re.sub(between, lambda found: as_read(found[0], MARK), value)
    return shlex.quote(f"{key}={within}")


def _missing_option(text: str, group: str, value: str, options: list[str]) -> Problem:
    if group in ("hydra/launcher", "hydra/sweeper"):
        options = [option for option in options if option != "basic"]  # a sweep refuses Hydra's own
    if not options:
        fix = f"add a file conf/{group}/{value}.yaml to the current directory"
        return Problem(text, f"the group `{group}` does not exist or has no file", fix, code="unknown-option")
    problem = (
        f"`{group}` has no {f'option `{value}`' if value else 'empty option'}; it has {', '.join(sorted(options))}"
    )
    if group == "data" and re.sub(r"\W|_", "", value.lower()) in other_names.ELSEWHERE:
        fix = "download it, then use `data=images data.path=FOLDER` or `data=huggingface data.path=NAME`"
        return Problem(text, problem, fix, code="unknown-option")
    meant = _option(group, value, options)
    fix = f"use {f'`{group}={meant}`' if meant else 'one of these'}, or add your own file conf/{group}/{value}.yaml"
    return Problem(text, problem, fix, (f"{group}={meant}",) if meant else (), code="unknown-option")


def _wrong_value(text: str, key: str, value: Any, kind: str) -> Problem:
    shown = text.partition("=")[2] if _bare_key(text) == key else str(value)
    return replace(validate.wrong_type(key, shown, kind), source=text)


def _broken_files(error: Exception) -> Problem:
    cause = _innermost(error)

    if isinstance(error, MissingConfigException):
        name = str(error.missing_cfg_file)
        there = [file.stem for place in (Path("conf"), CONF) for file in place.glob("*.yaml")]
        options = ", ".join(error.options or dict.fromkeys(there))
        problem = f"the search path has no such file (options: {options})"
        otherwise = "use a name on the path that `--info searchpath` prints, or `-cd FOLDER` for its directory"
        ways = [f"-cn {hit}" for hit in nearest(name, there)]
        return Problem.suggest(f"the configuration {name}", problem, ways, otherwise, code="missing-file")
    mark: Any = getattr(cause, "problem_mark", None)
    where = f" in {mark.name}, line {mark.line + 1}" if mark is not None else ""
    problem = getattr(cause, "problem", None) or next(iter(str(cause).splitlines()), "no reason is given")
    kind = "YAML can't be read" if mark is not None else type(cause).__name__
    if isinstance(cause, OmegaConfBaseException) and cause.full_key:
        where += f" at {cause.full_key}"
    fix = "correct that line, then run the same command"
    return Problem("the configuration's files", f"{kind}{where}: {problem}", fix, code="bad-file")


def _innermost(error: BaseException) -> BaseException:
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return error

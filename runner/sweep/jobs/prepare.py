"""Makes a sweep's jobs of its words: every combination, its name, its configuration; checks all before the first one starts.

For grid.py, the search and sweep.py. examine(), which checks, runs in a process of the launcher's:
it looks at the GPUs and imports the person's code.
"""

from __future__ import annotations

import copy
import itertools
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config import validate
from runner.config.identity import key_of, quoted
from runner.config.schema import Grid
from runner.config.validate import setting_problems, without_password
from runner.device import Choice, Hardware, parse, probe
from runner.errors import Problem, RunnerError, first_line, refuse
from runner.experiment.claim import is_used
from runner.experiment.terminal import say
from runner.sweep.jobs.ledger import Job
from runner.sweep.jobs.slots import DevicesFor

#: not a job's own: what says how the sweep is run
OF_THE_SWEEP = ("sweep.", "hydra.", "hydra/")
#: of a job's folder: it passes through shells, and through Hydra as a word of its own
USABLE = r"(?!\.)[\w.,=+@:\[\]() -]+"
LONGEST = 200  # bytes; most file systems take 255, and a job that is tried again has a longer one
PARAMS = "hydra.sweeper.params"
ZIP, ZIP_EXAMPLE = "sweep.zip", "sweep.zip={model.width:[64,128],optimizer.lr:[0.001,0.0003]}"
#: texts that Hydra reads as they are, and those among them that it takes for something else
PLAIN_WORD, NO_TEXTS = r"[A-Za-z_][\w./-]*", ("true", "false", "null", "inf", "nan")
#: one process sends all journals of a sweep to one store
OF_THE_STORE = ("tracking.uri", "tracking.enabled")
THE_SAME_FOR_ALL = (*OF_THE_SWEEP, *OF_THE_STORE)

Words = tuple[str, ...]
SEED = ("seed",)  # what jobs of one configuration differ in


@dataclass
class Prepared:
    """A job with its configuration; `missing` says why its device is not here."""

    job: Job
    config: DictConfig
    policy: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # that it may take; () on machines that this process does not see
    missing: Problem | None = None
    assigned: dict[str, Any] = field(default_factory=dict)  # what only this job is told: fields of Assignment
    others: tuple[Prepared, ...] = ()  # that are trained together with it, see sweep.jobs.together
    num_groups: int = 0  # of such jobs, that there are of the sweep

    @property
    def jobs(self) -> tuple[Job, ...]:
        """Its own, and those of the others."""
        return (self.job, *(other.job for other in self.others))


def grid_params(config: DictConfig) -> Mapping[str, Any]:
    """What a grid's settings give beside the words. Raises: RunnerError with everything that is wrong with them."""
    node = config.hydra.sweeper
    refuse(setting_problems(node, Grid, "hydra.sweeper"))
    return dict(OmegaConf.to_container(node.params, resolve=True) or {}) if node.params else {}  # type: ignore[arg-type]


def zips_of(config: DictConfig) -> list[Mapping[str, Any]]:
    """sweep.zip as plain values: lists of values by key, those that go together in a mapping. Raises: RunnerError for other forms."""
    node = config.sweep.zip
    found: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    each = found if isinstance(found, list) else [] if found is None else [found]
    if not all(isinstance(one, Mapping) for one in each):
        problem = "`sweep.zip` must be lists of values by key, or a list of such mappings"
        raise RunnerError.suggest(f"{ZIP}={as_word(found)}", problem, [ZIP_EXAMPLE])
    return each


def parsed_params(parser: Any, params: Mapping[str, Any]) -> list[Any]:
    """hydra.sweeper.params as Hydra's overrides. Raises: RunnerError with all that can't be read, or is no job's own."""
    from hydra.errors import HydraException

    found, problems = [], []
    for key, value in params.items():
        asked = f"{PARAMS}: {{{key}: {value}}}"
        try:
            (override,) = parser.parse_overrides([f"{key}={'null' if value is None else value}"])
        except HydraException as error:
            problem = " ".join(first_line(error).split())
            problems.append(Problem(asked, problem, f"use `{PARAMS}: {{{key}: 'interval(0.001,0.1)'}}`"))
            continue
        if is_of_the_sweep(override):
            problems.append(
                Problem.suggest(asked, f"`{key}` is a setting of the sweep, not of a job", [f"{key}={value}"])
            )
        found.append(override)
    refuse(problems)
    return found


def combinations(
    words: Sequence[str],
    config_loader: Any,
    *,
    params: Mapping[str, Any] | None = None,
    zipped: Sequence[Mapping[str, Any]] = (),
) -> list[tuple[tuple[str, ...], str]]:
    """Every job's overrides and its readable name: all combinations of the words with several values, in order. Of equal
    ones there is one, which is said.

    params: `hydra.sweeper.params`, which come before the words: a key that both have is the words'.
    zipped: of `sweep.zip`, each mapping with lists of values by key that go together: the first of each, the second, ...
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)
    parsed = parser.parse_overrides(list(words))
    refuse_swept_settings(parsed)
    parsed = parsed_params(parser, params or {}) + parsed
    _refuse_intervals(parsed)
    own = [override for override in parsed if not is_of_the_sweep(override)]
    # the last of a key, as Hydra has it
    own = list({override.get_key_element(): override for override in own}.values())
    swept = {override.get_key_element() for override in own if override.is_sweep_override()}
    rows = together(zipped, {override.get_key_element() for override in own})
    (jobs,) = BasicSweeper.split_arguments(own, None)
    if not jobs:
        fix = "use `KEY=VALUE1,VALUE2` with at least one value"
        raise RunnerError.of(" ".join(words), "the arguments describe no job", fix)
    swept |= {key for one in zipped for key in one}
    whole = [(*overrides, *row) for overrides in jobs for row in rows]
    each = list(dict.fromkeys(whole))
    if len(each) < len(whole):
        say(f"jobs     {len(whole) - len(each):,} of {len(whole):,} are equal to others, and equal jobs run once")
    return [(overrides, name_of(overrides, swept)) for overrides in each]


def together(zipped: Sequence[Mapping[str, Any]], others: Collection[str] = ()) -> list[tuple[str, ...]]:
    """The overrides of each row of sweep.zip, of several mappings all combinations; one empty row where there is none.

    others: the keys of the other words. Raises: RunnerError with everything that is wrong with it.
    """
    keys = [key_of(key) for one in zipped for key in one]
    taken = {*map(key_of, others), *(key for key in keys if keys.count(key) > 1)}
    if problems := dict.fromkeys(problem for one in zipped for problem in _zip_problems(one, taken)):
        raise RunnerError(*problems)
    each = [
        [
            tuple(f"{key}={as_word(value)}" for key, value in zip(one, row, strict=True))
            for row in zip(*one.values(), strict=True)
        ]
        for one in zipped
        if one
    ]
    return [tuple(itertools.chain(*rows)) for rows in itertools.product(*each)]


def _zip_problems(zipped: Mapping[str, Any], taken: Collection[str]) -> list[Problem]:
    problems = []
    for key, values in zipped.items():
        asked = f"{ZIP}={{{key}: {values}}}"
        if key_of(key).startswith(THE_SAME_FOR_ALL):
            problems.append(
                Problem(asked, f"`{key}` is a setting of the sweep, the same for all jobs", f"use `{key}=...`")
            )
        elif not isinstance(values, list) or not values:
            problem = f"`{key}` needs a list of values, one for each job"
            problems.append(Problem.suggest(asked, problem, [ZIP_EXAMPLE]))
        elif key_of(key) in taken:
            problems.append(Problem(asked, f"`{key}` is also among the arguments", f"set `{key}` in only one place"))
    lengths = {key: len(values) for key, values in zipped.items() if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        problems.append(
            Problem(
                ZIP, f"the lists of `sweep.zip` must have one length, and {counts}", "use as many values for each key"
            )
        )
    return problems


def as_word(value: Any) -> str:
    """A value as Hydra's grammar reads it back."""
    if value is None or isinstance(value, bool):
        return "null" if value is None else str(value).lower()
    if isinstance(value, Mapping):
        return "{" + ",".join(f"{key}:{as_word(each)}" for key, each in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(as_word, value)) + "]"
    if isinstance(value, str) and not (re.fullmatch(PLAIN_WORD, value, re.ASCII) and value.lower() not in NO_TEXTS):
        return quoted(value)
    return str(value)


def name_of(overrides: Sequence[str], swept: set[str]) -> str:
    """What sets a job apart; of a sweep over nothing, all that it was given."""
    apart = [text for text in overrides if text.partition("=")[0] in swept] or list(overrides)
    return " ".join(without_password(re.sub(r"\\(\W)", r"\1", text)) for text in apart)  # no letter is escaped


class Composer:
    """Composes a sweep's jobs: the first of those that differ in numbers alone as Hydra does, 0.1 s; the others, 10 ms
    each, as copies of it with other numbers put in."""

    def __init__(self, config_loader: Any, master: DictConfig) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self._loader, self._master = config_loader, master
        self._parser = OverridesParser.create(config_loader=config_loader)
        self._known: dict[tuple[str, ...], DictConfig] = {}  # by the overrides, numbers left out

    def compose(self, job: Job) -> DictConfig:
        """The job's configuration, its folder and number filled in."""
        parsed = self._parser.parse_overrides(list(job.overrides))
        shape = tuple(f"{each.key_or_group}=" if _is_number(each) else str(each.input_line) for each in parsed)
        like = self._known.get(shape)
        if like is None:
            like = self._known[shape] = self._loader.load_sweep_config(self._master, list(job.overrides))
            return _for_job(copy.deepcopy(like), self._master, job)
        if any(each.key_or_group in like.hydra.runtime.choices for each in parsed if _is_number(each)):
            return _for_job(self._loader.load_sweep_config(self._master, list(job.overrides)), self._master, job)
        return _for_job(_with_numbers(copy.deepcopy(like), parsed), self._master, job)


def _is_number(override: Any) -> bool:
    from hydra.core.override_parser.types import OverrideType

    value = override.value()
    return override.type == OverrideType.CHANGE and isinstance(value, int | float) and not isinstance(value, bool)


def _with_numbers(config: DictConfig, parsed: Sequence[Any]) -> DictConfig:
    from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname

    ConfigLoaderImpl._apply_overrides_to_config([each for each in parsed if _is_number(each)], config)
    names = config.hydra.job.config.override_dirname
    with read_write(config), open_dict(config):
        config.hydra.overrides.task = [each.input_line for each in parsed]
        config.hydra.job.override_dirname = get_overrides_dirname(
            overrides=list(parsed), kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
        )
    return config


def _for_job(config: DictConfig, master: DictConfig, job: Job) -> DictConfig:
    with read_write(config), open_dict(config):
        config.hydra.job.id, config.hydra.job.num = str(job.number), job.number
        job.folder_name = job.folder_name or re.sub(r"\\(.)", r"\1", str(config.hydra.sweep.subdir))
        config.hydra.sweep.dir = master.hydra.sweep.dir
        config.hydra.sweep.subdir = job.folder_name
        config.sweep = master.sweep
    return config


def folder_problems(jobs: Sequence[Job]) -> list[Problem]:
    """What is wrong with the folders that hydra.sweep.subdir names for jobs."""
    names = [job.folder_name for job in jobs]
    found = {}
    for name in names:
        if len(name.encode()) > LONGEST:
            found[name] = f"a directory's name has at most {LONGEST} bytes, and this one has {len(name.encode())}"
        elif not re.fullmatch(USABLE, name):
            found[name] = "the name of a job's directory may contain letters, digits and .,=+@:[]()-"
        elif names.count(name) > 1:
            found[name] = "several jobs would have this directory"
    fix = "use `hydra.sweep.subdir='${hydra.job.num}'`, or add `'hydra.job.config.override_dirname.exclude_keys=[KEY,...]'`"
    return [Problem(f"hydra.sweep.subdir={name or repr(name)}", problem, fix) for name, problem in found.items()]


def used_problems(folders: Iterable[Path]) -> list[Problem]:
    """What keeps new jobs out of their folders: a run that lies there."""
    fix = "use another `hydra.sweep.dir` (the default has the time in its name)"
    return [
        Problem(f"hydra.sweep.dir={folder.parent}", f"`{folder}` has a run, which is never overwritten", fix)
        for folder in folders
        if is_used(folder)
    ]


def examine(
    configs: Sequence[DictConfig], devices_for: DevicesFor, is_here: bool, *, hardware: Hardware | None = None
) -> list[Any]:
    """Checks jobs; runs in a process of its own, for it looks at the GPUs and imports the person's code.

    devices_for: asks the launcher. is_here: whether this machine is the one that the jobs' settings must suit.
    Returns the machine, then for each configuration its faults, policy, devices and what is missing.
    """
    from runner.experiment.check import check as check_config

    hardware = hardware or probe()
    found: list[Any] = [hardware]
    for config in configs:
        problems: list[Problem] = []
        policy: tuple[str, ...] = ()
        devices: tuple[str, ...] = ()
        missing: Problem | None = None
        try:
            policy = parse(OmegaConf.select(config, "device"))
            devices = devices_for(policy, hardware)
        except RunnerError as error:
            # a form that is none, or several devices for one job, is a mistake wherever it runs
            if policy and "all" not in policy:
                missing, problems = error.problems[0], []
            else:
                problems += error.problems
        if validate.value(config, "train.check") is True:
            fix = "run `train.check=true` with the arguments of one job, or `python -m runner plan -m ...` for all"
            problems.append(Problem("train.check=true in a sweep", "`train.check` checks a single run", fix))
        try:
            check_config(config, hardware if is_here else None, choice=Choice(devices[0] if devices else "cpu", ""))
        except RunnerError as error:
            problems += error.problems
        found.append((problems, policy, devices, missing))
    return found


def _refuse_intervals(parsed: Sequence[Any]) -> None:
    problem = "a grid needs a list of values, and an interval has none"
    found = [str(override.input_line) for override in parsed if override.is_interval_sweep()]
    refuse(Problem.suggest(text, problem, [f"hydra/sweeper=optuna '{text}'"]) for text in found)


def is_of_the_sweep(override: Any) -> bool:
    """Whether an override, as Hydra parsed it, says how the sweep is run, and is no part of a job."""
    return str(override.input_line).lstrip("+~").startswith(OF_THE_SWEEP)


def refuse_swept_settings(parsed: Sequence[Any]) -> None:
    """Raises: RunnerError for what says how the sweep is run and has several values."""
    found = []
    for override in parsed:
        text, key = str(override.input_line), override.key_or_group
        if override.is_sweep_override() and text.lstrip("+~").startswith(THE_SAME_FOR_ALL):
            found.append(
                Problem(text, f"`{key}` must be the same for all jobs of a sweep", f"use `{key}=...` with one value")
            )
    refuse(found)


def store_problems(prepared: Sequence[Prepared], config: DictConfig) -> list[Problem]:
    """What a job says of its store, by an option of a group, say, and the sweep does not. config: what all have in common."""
    found: dict[tuple[str, Any], Problem] = {}
    for job in prepared:
        for key in OF_THE_STORE:
            theirs, ours = validate.value(job.config, key), validate.value(config, key)
            if theirs != ours:
                asked, shown = (without_password(f"{key}={as_word(value)}") for value in (theirs, ours))
                problem = f"`{key}` must be the same for all jobs of a sweep, and the first job has `{shown}`"
                fix = f"use `{key}=...` with one value, or a sweep for each value"
                found.setdefault((key, theirs), Problem(f"{job.job.name}, with {asked}", problem, fix))
    return list(found.values())


def configurations(jobs: Sequence[tuple[Words, str]]) -> list[Words]:
    """The jobs' overrides without their seeds, each once: of one with folds there are as many."""
    return list(dict.fromkeys(without(SEED, overrides) for overrides, _ in jobs))


def without(keys: Words, overrides: Words) -> Words:
    """The overrides but those of these keys."""
    return tuple(word for word in overrides if key_of(word) not in keys)

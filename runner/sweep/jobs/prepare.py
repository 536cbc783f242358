"""Make a sweep's jobs from its overrides: every combination, its name and its configuration; check all before the first starts.

examine() runs in another process, as it queries the GPUs and imports the user's code.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig, OmegaConf, open_dict, read_write

from runner.config import validate
from runner.config.identity import key_of, quoted
from runner.config.schema import GridKeys
from runner.config.validate import setting_problems
from runner.device import Choice, Hardware, parse, probe
from runner.errors import Problem, RunnerError, first_line, refuse, without_password
from runner.experiment.context import RunContext
from runner.experiment.directory import Run
from runner.experiment.terminal import say
from runner.sweep.jobs.ledger import Job

if TYPE_CHECKING:
    from runner.training.observer import Trial

#: keys of the sweep, not of a job
SWEEP_PREFIXES = ("sweep.", "hydra.", "hydra/")
#: characters of a job's directory that need no quoting in shells and overrides
USABLE = r"(?!\.)[\w.,=+@:\[\]() -]+"
LONGEST = 200  # bytes; most file systems allow 255, and a repeated job has a longer name
PARAMS = "hydra.sweeper.params"
ZIP, ZIP_EXAMPLE = "sweep.zip", "sweep.zip={model.width:[64,128],optimizer.lr:[0.001,0.0003]}"
#: strings that Hydra reads unquoted, and those among them with another meaning
PLAIN_WORD, NO_TEXTS = r"[A-Za-z_][\w./-]*", ("true", "false", "null", "inf", "nan")
#: one uploader sends all journals of a sweep to one store
STORE_KEYS = ("tracking.uri", "tracking.enabled")
THE_SAME_FOR_ALL = (*SWEEP_PREFIXES, *STORE_KEYS)

Overrides = tuple[str, ...]
#: from a policy and this machine to the devices that a job may use where it runs
DevicesFor = Callable[[tuple[str, ...], Hardware], tuple[str, ...]]
SEED = ("seed",)  # the difference between jobs of one configuration


@dataclass
class PreparedJob:
    """A job with its configuration; `missing` says why its device is not here."""

    job: Job
    config: DictConfig
    policy: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()  # that it may use; () for other machines
    missing: Problem | None = None
    trial: Trial | None = None  # of a search: may be pruned
    others: tuple[PreparedJob, ...] = ()  # the other members of its group, see sweep.jobs.together
    num_groups: int = 0  # in the sweep

    @property
    def jobs(self) -> tuple[Job, ...]:
        """This job and the other members."""
        return (self.job, *(other.job for other in self.others))


def in_name_of(context: RunContext, job: Job) -> RunContext:
    """Return the context of a member of the sweep with this job's name."""
    assert context.member is not None
    return replace(context, member=replace(context.member, name=job.name))


def grid_params(config: DictConfig) -> Mapping[str, Any]:
    """Return the overrides in a grid's settings. Raises: RunnerError with all problems in them."""
    node = config.hydra.sweeper
    refuse(setting_problems(node, GridKeys, "hydra.sweeper"))
    return dict(OmegaConf.to_container(node.params, resolve=True) or {}) if node.params else {}  # type: ignore[arg-type]


def zip_of(config: DictConfig) -> Mapping[str, Any]:
    """Return sweep.zip as plain values, lists by key. Raises: RunnerError for other forms."""
    node = config.sweep.zip
    plain: Any = OmegaConf.to_container(node, resolve=True) if OmegaConf.is_config(node) else node
    if not isinstance(plain, Mapping | None):
        problem = "`sweep.zip` must be lists of values by key"
        raise RunnerError.suggest(f"{ZIP}={as_word(plain)}", problem, [ZIP_EXAMPLE])
    return plain or {}


def parsed_params(parser: Any, params: Mapping[str, Any]) -> list[Any]:
    """Return hydra.sweeper.params as Hydra's overrides. Raises: RunnerError with all that can't be parsed or are not of a job."""
    from hydra.errors import HydraException

    overrides, problems = [], []
    for key, value in params.items():
        source = f"{PARAMS}: {{{key}: {value}}}"
        try:
            (override,) = parser.parse_overrides([f"{key}={'null' if value is None else value}"])
        except HydraException as error:
            problem = " ".join(first_line(error).split())
            problems.append(Problem(source, problem, f"use `{PARAMS}: {{{key}: 'interval(0.001,0.1)'}}`"))
            continue
        if is_of_the_sweep(override):
            problem = f"`{key}` is a setting of the sweep, not of a job"
            problems.append(Problem.suggest(source, problem, [f"{key}={value}"]))
        overrides.append(override)
    refuse(problems)
    return overrides


def combinations(
    arguments: Sequence[str],
    config_loader: Any,
    *,
    params: Mapping[str, Any] | None = None,
    zipped: Mapping[str, Any] | None = None,
) -> list[tuple[Overrides, str]]:
    """Return every job's overrides and name: all combinations of the values, in order, each once.

    Args:
        arguments: Of the command line.
        config_loader: Hydra's.
        params: `hydra.sweeper.params`; the command line's values of a key win.
        zipped: `sweep.zip`: lists of values by key that are combined element by element.
    """
    from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
    from hydra.core.override_parser.overrides_parser import OverridesParser

    parser = OverridesParser.create(config_loader=config_loader)
    parsed = parser.parse_overrides(list(arguments))
    refuse_swept_settings(parsed)
    parsed = parsed_params(parser, params or {}) + parsed
    problem = "a grid needs a list of values, and an interval has none"
    intervals = [str(override.input_line) for override in parsed if override.is_interval_sweep()]
    refuse(Problem.suggest(text, problem, [f"hydra/sweeper=optuna '{text}'"]) for text in intervals)
    # the last value of a key counts, as in Hydra
    own = {override.get_key_element(): override for override in parsed if not is_of_the_sweep(override)}
    swept = {key for key, override in own.items() if override.is_sweep_override()}
    rows = _zip_rows(zipped or {}, own)
    (jobs,) = BasicSweeper.split_arguments(list(own.values()), None)
    if not jobs:
        fix = "use `KEY=VALUE1,VALUE2` with at least one value"
        raise RunnerError.of(" ".join(arguments), "the arguments describe no job", fix)
    swept |= {*(zipped or {})}
    whole = [(*overrides, *row) for overrides in jobs for row in rows]
    each = list(dict.fromkeys(whole))
    if len(each) < len(whole):
        say(f"jobs     {len(whole) - len(each):,} of {len(whole):,} are equal to others, and equal jobs run once")
    return [(overrides, name_of(overrides, swept)) for overrides in each]


def _zip_rows(zipped: Mapping[str, Any], others: Collection[str]) -> list[Overrides]:
    """Return the overrides of each row of sweep.zip; one empty row without it. others: The keys of the other overrides."""
    refuse(_zip_problems(zipped, {*map(key_of, others)}))
    columns = [[f"{key}={as_word(value)}" for value in values] for key, values in zipped.items()]
    return list(zip(*columns, strict=True)) if columns else [()]


def _zip_problems(zipped: Mapping[str, Any], taken: Collection[str]) -> list[Problem]:
    problems = []
    for key, values in zipped.items():
        source = f"{ZIP}={{{key}: {values}}}"
        if key_of(key).startswith(THE_SAME_FOR_ALL):
            problem = f"`{key}` is a setting of the sweep, the same for all jobs"
            problems.append(Problem(source, problem, f"use `{key}=...`"))
        elif not isinstance(values, list) or not values:
            problem = f"`{key}` needs a list of values, one for each job"
            problems.append(Problem.suggest(source, problem, [ZIP_EXAMPLE]))
        elif key_of(key) in taken:
            problems.append(Problem(source, f"`{key}` is also among the arguments", f"set `{key}` in only one place"))
    lengths = {key: len(values) for key, values in zipped.items() if isinstance(values, list)}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {count}" for key, count in lengths.items())
        problem = f"the lists of `sweep.zip` must have one length, and {counts}"
        problems.append(Problem(ZIP, problem, "use as many values for each key"))
    return problems


def as_word(value: Any) -> str:
    """Return a value in Hydra's grammar."""
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
    """Return the overrides in which a job differs from the others, or all overrides of a single job."""
    apart = [text for text in overrides if text.partition("=")[0] in swept] or list(overrides)
    return " ".join(without_password(re.sub(r"\\(\W)", r"\1", text)) for text in apart)  # without Hydra's escapes


class Composer:
    """Composes a sweep's jobs. Jobs that differ only in numbers are copies of the first one: 10 ms instead of 0.1 s."""

    def __init__(self, config_loader: Any, master: DictConfig) -> None:
        from hydra.core.override_parser.overrides_parser import OverridesParser

        self._loader, self._master = config_loader, master
        self._parser = OverridesParser.create(config_loader=config_loader)
        self._known: dict[tuple[str, ...], DictConfig] = {}  # by the overrides without numbers

    def compose(self, job: Job) -> DictConfig:
        """Return the job's configuration, with its directory and number."""
        from hydra._internal.config_loader_impl import ConfigLoaderImpl, get_overrides_dirname

        parsed = self._parser.parse_overrides(list(job.overrides))
        numbers = [override for override in parsed if _is_number(override)]
        shape = tuple(f"{each.key_or_group}=" if _is_number(each) else str(each.input_line) for each in parsed)
        like = self._known.get(shape)
        is_choice = like is not None and any(each.key_or_group in like.hydra.runtime.choices for each in numbers)
        if like is None or is_choice:
            config = self._loader.load_sweep_config(self._master, list(job.overrides))
            self._known.setdefault(shape, copy.deepcopy(config))
            return _for_job(config, self._master, job)
        config = copy.deepcopy(like)
        ConfigLoaderImpl._apply_overrides_to_config(numbers, config)
        names = config.hydra.job.config.override_dirname
        with read_write(config), open_dict(config):
            config.hydra.overrides.task = [each.input_line for each in parsed]
            config.hydra.job.override_dirname = get_overrides_dirname(
                overrides=list(parsed), kv_sep=names.kv_sep, item_sep=names.item_sep, exclude_keys=names.exclude_keys
            )
        return _for_job(config, self._master, job)


def _is_number(override: Any) -> bool:
    from hydra.core.override_parser.types import OverrideType

    value = override.value()
    return override.type == OverrideType.CHANGE and isinstance(value, int | float) and not isinstance(value, bool)


def _for_job(config: DictConfig, master: DictConfig, job: Job) -> DictConfig:
    with read_write(config), open_dict(config):
        config.hydra.job.id, config.hydra.job.num = str(job.number), job.number
        job.folder_name = job.folder_name or re.sub(r"\\(.)", r"\1", str(config.hydra.sweep.subdir))
        config.hydra.sweep.dir = master.hydra.sweep.dir
        config.hydra.sweep.subdir = job.folder_name
        config.sweep = master.sweep
    return config


def folder_problems(jobs: Sequence[Job]) -> list[Problem]:
    """Return the problems of the job directories from hydra.sweep.subdir."""
    names = [job.folder_name for job in jobs]
    causes = {}
    for name in names:
        if len(name.encode()) > LONGEST:
            causes[name] = f"a directory's name has at most {LONGEST} bytes, and this one has {len(name.encode())}"
        elif not re.fullmatch(USABLE, name):
            causes[name] = "the name of a job's directory may contain letters, digits and .,=+@:[]()-"
        elif names.count(name) > 1:
            causes[name] = "several jobs would have this directory"
    fix = "use `hydra.sweep.subdir='${hydra.job.num}'`, or add `'hydra.job.config.override_dirname.exclude_keys=[KEY,...]'`"
    return [Problem(f"hydra.sweep.subdir={name or repr(name)}", cause, fix) for name, cause in causes.items()]


def used_problems(folders: Iterable[Path]) -> list[Problem]:
    """Return an error for each directory of a new job that has a run already."""
    fix = "use another `hydra.sweep.dir` (the default has the time in its name)"
    return [
        Problem(f"hydra.sweep.dir={folder.parent}", f"`{folder}` has a run, which is never overwritten", fix)
        for folder in folders
        if Run(folder).has_begun
    ]


def examine(
    configs: Sequence[DictConfig], devices_for: DevicesFor, is_here: bool, *, hardware: Hardware | None = None
) -> list[Any]:
    """Check jobs, in another process, as it queries the GPUs and imports the user's code.

    Args:
        devices_for: Of the launcher.
        is_here: Whether the jobs run on this machine.

    Returns:
        The hardware; then for each configuration its problems, policy, devices, and why its device is missing.
    """
    from runner.experiment.check import check as check_config

    hardware = hardware or probe()
    answers: list[Any] = [hardware]
    for config in configs:
        problems: list[Problem] = []
        policy: tuple[str, ...] = ()
        devices: tuple[str, ...] = ()
        missing: Problem | None = None
        try:
            policy = parse(OmegaConf.select(config, "device"))
            devices = devices_for(policy, hardware)
        except RunnerError as error:
            # an invalid device, or several devices for one job, is an error on every machine
            if policy and "all" not in policy:
                missing = error.problems[0]
            else:
                problems += error.problems
        if validate.value(config, "train.check") is True:
            fix = "run `train.check=true` with the arguments of one job, or `python -m runner plan -m ...` for all"
            problems.append(Problem("train.check=true in a sweep", "`train.check` checks a single run", fix))
        try:
            check_config(config, hardware if is_here else None, choice=Choice(devices[0] if devices else "cpu", ""))
        except RunnerError as error:
            problems += error.problems
        answers.append((problems, policy, devices, missing))
    return answers


def is_of_the_sweep(override: Any) -> bool:
    """Return whether a parsed override is a setting of the sweep, not of a job."""
    return str(override.input_line).lstrip("+~").startswith(SWEEP_PREFIXES)


def refuse_swept_settings(parsed: Sequence[Any]) -> None:
    """Raises: RunnerError for settings of the sweep with several values."""
    problems = []
    for override in parsed:
        text, key = str(override.input_line), override.key_or_group
        if override.is_sweep_override() and text.lstrip("+~").startswith(THE_SAME_FOR_ALL):
            problem = f"`{key}` must be the same for all jobs of a sweep"
            problems.append(Problem(text, problem, f"use `{key}=...` with one value"))
    refuse(problems)


def store_problems(prepared: Sequence[PreparedJob], config: DictConfig) -> list[Problem]:
    """Return the store settings of a job that differ from the sweep's, e.g., by an option. config: common to all jobs."""
    problems: dict[tuple[str, Any], Problem] = {}
    for job in prepared:
        for key in STORE_KEYS:
            theirs, ours = validate.value(job.config, key), validate.value(config, key)
            if theirs != ours:
                source, shown = (without_password(f"{key}={as_word(value)}") for value in (theirs, ours))
                problem = f"`{key}` must be the same for all jobs of a sweep, and the first job has `{shown}`"
                fix = f"use `{key}=...` with one value, or a sweep for each value"
                problems.setdefault((key, theirs), Problem(f"{job.job.name}, with {source}", problem, fix))
    return list(problems.values())


def configurations(jobs: Sequence[tuple[Overrides, str]]) -> list[Overrides]:
    """Return the jobs' overrides without seeds, each once."""
    return list(dict.fromkeys(without(SEED, overrides) for overrides, _ in jobs))


def without(keys: Overrides, overrides: Overrides) -> Overrides:
    """Return the overrides without those of these keys."""
    return tuple(word for word in overrides if key_of(word) not in keys)

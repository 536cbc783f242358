"""Composes the configuration from flags and overrides: Hydra, with our schema, search path and checks.

Hydra's loader is extended, not changed: `CheckedLoader` examines what it has composed, and reads files with our checks. This is the
only module that uses Hydra's private names (of 1.3).
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Override, OverrideType
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from yaml import YAMLError

from runner.config import nodes, schema, secrets, trust, validate
from runner.config.defaults import CONF as CONF
from runner.config.run_files import MAX_ALIASED_VALUES, yaml_refusal
from runner.config.validate import Misfit
from runner.errors import RunnerError, harmless, refuse

Compose = Callable[[list[str]], DictConfig]

#: flags with which Hydra prints something, and runs nothing
SHOWS = {"--cfg", "-c", "--info", "-i", "--shell-completion", "-sc"}
INFOS = ("all", "config", "defaults", "defaults-tree", "plugins", "searchpath")

#: what Hydra, OmegaConf and YAML raise for an override or a file, and what their own code fails with
COMPOSITION = (HydraException, OmegaConfBaseException, YAMLError)
FAILURES = (AssertionError, AttributeError, LookupError, OSError, RecursionError, TypeError, ValueError)
REFUSALS = (*COMPOSITION, RunnerError, *FAILURES)
#: how Hydra reports an override that only a sweep takes
NEEDS_SWEEP = ("Ambiguous value for argument", "Sweep parameters", "You must specify")


@dataclass(frozen=True)
class Composed:
    """A file that Hydra has composed: its path, and the key above its keys."""

    path: Path
    package: str


class MisfitError(ConfigCompositionException):
    """The configuration has values that do not fit the schema."""

    def __init__(
        self, misfits: Sequence[Misfit], config: DictConfig, overrides: list[str], files: Sequence[Composed]
    ) -> None:
        super().__init__(", ".join(f"{each.key}={each.value} does not fit" for each in misfits))
        self.misfits = misfits
        self.config = config  # without them
        self.overrides = overrides
        self.files = files  # that were composed, the last one first


class CheckedRepository(ConfigRepository):
    """Hydra's sources of configurations, which refuses files with endless aliases."""

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = next((each for each in self.sources if each.is_config(config_path)), None)
        if source is not None and source.scheme() == "file":
            file = Path(source.path, source._normalize_file_name(config_path))
            if why := yaml_refusal(file, max_values=MAX_ALIASED_VALUES):
                fix = f"write the values in {file.name} instead of aliases"
                raise RunnerError.of(str(file), why, fix, code="bad-file")
        return super().load_config(config_path)


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, which examines what it has composed."""

    def __init__(self, flags: Sequence[str] = (), *, completes: bool = False) -> None:
        """Look for the directories of the search path. completes: A shell asks: import no user code, and print nothing."""
        schema.register()
        super().__init__(_search_path(flags))
        self.repository = CheckedRepository(self.config_search_path)
        self._completes, self._examines = completes, True
        self._printed: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        """In a job's process it composes what was examined in this one."""
        return {**self.__dict__, "_examines": False}

    def load_configuration(
        self,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        from_shell: bool = True,
        validate_sweep_overrides: bool = True,
    ) -> DictConfig:
        """Compose as Hydra does.

        Raises:
            RunnerError: It would call code that is not allowed (runner.config.trust).
            MisfitError: Keys do not exist, or have values of another type.
        """
        if not self._examines:
            cfg = super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
            validate.give_types(cfg)
            nodes.name_data(cfg, self.file_of)
            return cfg
        rerun = self.file_of(trust.RERUN) if (config_name or "").removesuffix(".yaml") == trust.RERUN else None
        refuse(trust.rerun_problems(rerun) if rerun is not None else ())
        secrets.note_secrets_in(overrides)
        cfg = super().load_configuration(config_name, overrides, run_mode, False, validate_sweep_overrides)
        problems = trust.hydra_problems(cfg.hydra) + (trust.take_no_store(cfg, rerun, overrides) if rerun else [])
        secrets.note_secrets_of(cfg)
        refuse(problems)
        if misfits := validate.give_types(cfg):
            raise MisfitError(misfits, cfg, overrides, [*self._files(config_name, overrides, run_mode)])
        if self._completes:
            return cfg
        nodes.simplify(cfg)
        nodes.name_data(cfg, self.file_of)
        for line in nodes.leave_out(cfg, overrides, self.file_of):
            if line not in self._printed:
                print(harmless(line), file=sys.stderr)  # stdout may be a file that --cfg job is kept in
            self._printed.add(line)
        return cfg

    def _files(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Iterator[Composed]:
        for default in self.compute_defaults_list(config_name, overrides, run_mode).defaults[::-1]:
            path = self.file_of(default.config_path or "")
            if path is not None and not path.is_relative_to(CONF):
                yield Composed(path, default.package or "")

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        """Let Hydra set each value, also where its key does not exist: all misfits are found afterwards."""
        parsed, repo = super()._parse_overrides_and_create_caching_repo(config_name, overrides)
        for each in parsed:
            is_value = isinstance(each.value(), dict) or not repo.group_exists(each.key_or_group)
            if is_value and each.type == OverrideType.CHANGE and not each.is_hydra_override():
                each.type = OverrideType.FORCE_ADD
        return parsed, repo

    def file_of(self, name: str) -> Path | None:
        """Return the file that Hydra reads a configuration from."""
        folders = (Path(item.path.removeprefix("file://")) for item in self.get_search_path().get_path() if item.path)
        return next((file for folder in folders if (file := folder / f"{name}.yaml").is_file()), None)


def _search_path(flags: Sequence[str]) -> ConfigSearchPath:
    """The directory of --config-dir first, then the current one's conf/, then the built-in one (hydra#2758)."""
    path = create_config_search_path(str(CONF))
    own, named = Path.cwd() / "conf", _value_of(flags, "-cd", "--config-dir")
    if own.is_dir() and not own.samefile(CONF):
        path.prepend("own", f"file://{own}", anchor="main")
    if named is not None:
        # a run's directory is data: files of the same name in conf/ win
        before = "schema" if config_name(flags) == trust.RERUN else "own" if own.is_dir() else "main"
        before = before if any(item.provider == before for item in path.get_path()) else "main"
        path.prepend("command-line", f"file://{Path(named).absolute()}", anchor=before)
    return path


def config_name(flags: Sequence[str]) -> str:
    """Return the name of the main configuration."""
    return (_value_of(flags, "-cn", "--config-name") or "config").removesuffix(".yaml")


def _value_of(flags: Sequence[str], *names: str) -> str | None:
    value, rest = None, iter(flags)
    for flag in rest:
        name, equals, text = flag.partition("=")
        if name in names:
            value = text if equals else next(rest, None)
    return value


@contextmanager
def hydra_with(loader: CheckedLoader) -> Iterator[Hydra]:
    """Hydra as it is while an application runs, with our loader; afterwards as it was before."""
    version.setbase("1.3")
    holder = GlobalHydra.instance()
    before = holder.hydra
    holder.clear()
    hydra = Hydra("runner", loader)
    holder.initialize(hydra)
    try:
        yield hydra
    finally:
        holder.clear()
        if before is not None:
            holder.initialize(before)


def composer(flags: Sequence[str] = (), *, mode: RunMode = RunMode.RUN, loader: CheckedLoader | None = None) -> Compose:
    """Return a function that composes as the command line with these flags would, without running anything.

    mode: MULTIRUN for the values that a sweep's jobs share, without overrides with several values.
    loader: A loader that has composed before (None: a new one).
    """
    reader = loader or CheckedLoader(flags)

    def compose(overrides: list[str]) -> DictConfig:
        with hydra_with(reader):
            return reader.load_configuration(config_name(flags), overrides, mode)

    return compose


def compose_job(loader: CheckedLoader, flags: Sequence[str], overrides: list[str], *, is_sweep: bool) -> DictConfig:
    """Compose a run or, if `hydra.mode` of the result is MULTIRUN, what the jobs of a sweep have in common.

    is_sweep: Whether -m is among the flags. A file may set `hydra.mode`, too.
    """
    name = config_name(flags)
    if is_sweep:
        return loader.load_configuration(name, [*overrides, "hydra.mode=MULTIRUN"], RunMode.MULTIRUN)
    try:
        cfg = loader.load_configuration(name, overrides, RunMode.RUN)
    except ConfigCompositionException as error:
        if not str(error).startswith(NEEDS_SWEEP) or not asks_for_a_sweep(flags, overrides):
            raise
        return loader.load_configuration(name, overrides, RunMode.MULTIRUN)
    if cfg.hydra.mode == RunMode.MULTIRUN:
        return loader.load_configuration(name, overrides, RunMode.MULTIRUN)
    if cfg.hydra.mode is None:
        cfg.hydra.mode = RunMode.RUN
        cfg.hydra.overrides.hydra.append("hydra.mode=RUN")
    return cfg


def context_of(loader: CheckedLoader, cfg: DictConfig) -> HydraContext:
    """Return what Hydra gives a job and a sweeper: the loader, and the callbacks of `hydra.callbacks`."""
    return HydraContext(config_loader=loader, callbacks=Callbacks(cfg))


@contextmanager
def sweep_context(flags: Sequence[str], overrides: list[str]) -> Iterator[tuple[HydraContext, DictConfig]]:
    """Yield what Hydra passes to a sweeper, for a command that runs its own sweep: the context, and the jobs' common configuration."""
    loader = CheckedLoader(flags)
    with hydra_with(loader):
        cfg = loader.load_configuration(config_name(flags), overrides, RunMode.MULTIRUN)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_readonly(cfg.hydra, None)
        yield context_of(loader, cfg), cfg


def show(flags: Sequence[str], overrides: Sequence[str]) -> bool:
    """Print the result of --cfg, --info or --shell-completion. Returns whether one of them is set."""
    names = {flag.partition("=")[0] for flag in flags}
    if SHOWS.isdisjoint(names):
        return False
    name, cfg_type = config_name(flags), _value_of(flags, "--cfg", "-c")
    # --info and --shell-completion get all words as flags
    arguments = list(overrides) or [flag for flag in flags if "=" in flag and not flag.startswith("-")]
    completes = not names.isdisjoint({"--shell-completion", "-sc"})
    with hydra_with(CheckedLoader(flags, completes=completes)) as hydra:
        if cfg_type is not None:
            hydra.show_cfg(name, list(overrides), cfg_type, _value_of(flags, "--package", "-p"), "--resolve" in flags)
        elif completes:
            hydra.shell_completion(name, arguments)
        else:
            info = _value_of(flags, "--info", "-i")
            hydra.show_info(info if info in INFOS else "all", name, arguments)
    return True


def asks_for_a_sweep(flags: Sequence[str], overrides: list[str]) -> bool:
    """Whether a file says hydra.mode: MULTIRUN. False if nothing can be composed, which is reported later."""
    try:
        cfg = composer(flags, mode=RunMode.MULTIRUN)(overrides)
    except REFUSALS:
        return False
    return bool(cfg.hydra.mode == RunMode.MULTIRUN)


def known_keys() -> list[str]:
    """Every dotted key of the default configuration."""
    return [key for key in validate.all_keys(composer([])([])) if not key.startswith("hydra")]


def composed_with(compose: Compose, overrides: Sequence[str]) -> DictConfig:
    cfg = compose(list(overrides))
    HydraConfig.instance().set_config(cfg)
    del cfg.hydra
    return cfg

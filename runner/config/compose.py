"""Composes the configuration from flags and overrides: Hydra, with our schema, search path and checks.

Hydra's loader is extended, not changed: `CheckedLoader` examines what it has composed, and reads files with our checks. This is the
only module that uses Hydra's private names (of 1.3).
"""

from __future__ import annotations

import re
import sys
from argparse import ArgumentParser
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import version
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import ConfigRepository
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException, ValidationError

from runner.config import logs, nodes, schema, secrets, trust, validate
from runner.config.defaults import CONF as CONF
from runner.config.identity import REMOVED, key_of
from runner.config.run_files import MAX_ALIASED_VALUES, yaml_refusal
from runner.errors import RunnerError, harmless, refuse

Compose = Callable[[list[str]], DictConfig]

#: flags with which Hydra prints something, and runs nothing
SHOWS = {"--cfg", "-c", "--info", "-i", "--hydra-help", "--shell-completion", "-sc"}

#: how Hydra reports a value in a file
IN_A_FILE = re.compile(r"In '(?P<name>.*)': \w+ raised while composing config:")
#: and an override that only a sweep takes
OF_ONE_RUN = ("Ambiguous value for argument", "Sweep parameters", "You must specify")


class WrongFile(ConfigCompositionException):
    """A file of conf/ that does not fit in; Hydra's message has its name and the key."""

    name: str  # in Hydra's words, GROUP/NAME
    key: str
    package: str  # the key above the file's keys
    file: Path | None
    parent: str  # the file whose defaults have it
    parent_file: Path | None


class CheckedFiles(FileConfigSource):
    """Hydra's reader of files; refuses endless aliases, and drops the null values of removed keys from a run's rerun.yaml."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if why := yaml_refusal(file, max_values=MAX_ALIASED_VALUES):
            fix = f"write the values in {file.name} instead of aliases"
            raise RunnerError.of(str(file), why, fix, code="bad-file")
        found = super().load_config(config_path)
        for key in REMOVED if file.stem == trust.RERUN else ():
            section, _, name = key.rpartition(".")
            node = OmegaConf.select(found.config, section) if OmegaConf.is_dict(found.config) else None
            if not isinstance(node, DictConfig) or name not in node:
                continue
            if node[name] is not None:
                problem, fix = f"`{key}` was removed: a model is on one device", f"write `{name}: null` in that file"
                raise RunnerError.of(f"{key} in {file}", problem, fix, code="unknown-key")
            del node[name]
        return found


class CheckedRepository(ConfigRepository):
    """Hydra's sources, with CheckedFiles for those that are directories."""

    def initialize_sources(self, config_search_path: ConfigSearchPath) -> None:
        super().initialize_sources(config_search_path)
        self.sources = [
            CheckedFiles(source.provider, source.path) if source.scheme() == "file" else source
            for source in self.sources  # Hydra's scan of its plugins makes its classes again
        ]


class CheckedLoader(ConfigLoaderImpl):
    """Hydra's loader, which examines what it has composed."""

    def __init__(self, flags: Sequence[str] = (), *, completes: bool = False) -> None:
        """Look for the directories of the search path.

        Args:
            flags: Hydra's flags; --config-dir and --config-name count.
            completes: Whether a shell asks, for which no user code is imported and nothing is printed.
        """
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
        def load(words: list[str]) -> DictConfig:
            return self._examined(config_name, words, run_mode, validate_sweep_overrides)

        if not self._examines:
            return super().load_configuration(config_name, overrides, run_mode, from_shell, validate_sweep_overrides)
        if self._completes:
            return load(overrides)
        cfg = nodes.with_arguments(load, overrides)
        nodes.simplify(cfg)
        nodes.name_data(cfg, self.file_of)
        for line in nodes.leave_out(cfg, overrides, self.file_of):
            if line not in self._printed:
                print(harmless(line), file=sys.stderr)  # stdout may be a file that --cfg job is kept in
            self._printed.add(line)
        return cfg

    def _examined(
        self, config_name: str | None, overrides: list[str], run_mode: RunMode, validate_sweep_overrides: bool
    ) -> DictConfig:
        """Compose as Hydra does.

        Raises:
            RunnerError: It would call code that is not allowed (runner.config.trust), or has a log that can't be made.
            WrongFile: A file of conf/ does not fit in.
        """
        name = (config_name or "").removesuffix(".yaml")
        found, first = [], None
        if name == trust.RERUN:
            first = self.file_of(name)
            found = trust.rerun_problems(first) if first is not None else []
        if not found:
            secrets.note_secrets_in(overrides)
            for word in filter(_is_number_for_boolean, overrides):  # which OmegaConf takes for true
                raise ConfigCompositionException(word) from ValidationError(word)
            try:
                cfg = super().load_configuration(config_name, overrides, run_mode, False, validate_sweep_overrides)
            except ConfigCompositionException as error:
                raise self._with_its_file(error, config_name, overrides, run_mode) from error.__cause__
            found = trust.hydra_problems(cfg.hydra) or logs.problems(cfg.hydra)
            if first is not None:
                found += trust.take_no_store(cfg, first, overrides)
            secrets.note_secrets_of(cfg)
        refuse(found)
        return cfg

    def _with_its_file(
        self, error: ConfigCompositionException, config_name: str | None, overrides: list[str], run_mode: RunMode
    ) -> ConfigCompositionException:
        match, cause = IN_A_FILE.match(str(error)), error.__context__
        if match is None or not isinstance(cause, OmegaConfBaseException):
            return error
        defaults = self.compute_defaults_list(config_name, overrides, run_mode).defaults
        default = next(default for default in defaults if default.config_path == match["name"])
        parent = default.parent or ""
        wrong = WrongFile(str(error))
        wrong.name, wrong.key, wrong.package = match["name"], str(cause.full_key or cause.key), default.package or ""
        wrong.file, wrong.parent, wrong.parent_file = self.file_of(match["name"]), parent, self.file_of(parent)
        return wrong

    def file_of(self, name: str) -> Path | None:
        """Return the file that Hydra reads a configuration from."""
        places = (Path(item.path.removeprefix("file://")) for item in self.get_search_path().get_path() if item.path)
        return next((file for place in places if (file := place / f"{name}.yaml").is_file()), None)


def _is_number_for_boolean(override: str) -> bool:
    kind = validate.kind_of(key_of(override)) if re.search(r"=-?[\d.]+$", override) else None
    return kind is not None and kind.startswith("bool")


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
    value, given = None, iter(flags)
    for word in given:
        name, equals, text = word.partition("=")
        if name in names:
            value = text if equals else next(given, None)
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
        if not str(error).startswith(OF_ONE_RUN) or not asks_for_a_sweep(flags, overrides):
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
    """What Hydra gives a sweeper: the context, and what all jobs have in common; for a command that runs its own sweep."""
    loader = CheckedLoader(flags)
    with hydra_with(loader):
        cfg = loader.load_configuration(config_name(flags), overrides, RunMode.MULTIRUN)
        HydraConfig.instance().set_config(cfg)
        OmegaConf.set_readonly(cfg.hydra, None)
        yield context_of(loader, cfg), cfg


def show(flags: Sequence[str], overrides: Sequence[str]) -> bool:
    """Print the result of --cfg, --info, --hydra-help or --shell-completion. Returns whether one of them is set."""
    if SHOWS.isdisjoint(word.partition("=")[0] for word in flags):
        return False
    parser = _hydra_flags()
    asked = parser.parse_intermixed_args([*flags, *overrides])
    name, words = config_name(flags), asked.overrides
    with hydra_with(CheckedLoader(flags, completes=asked.shell_completion)) as hydra:
        if asked.hydra_help:
            hydra.hydra_help(name, parser, asked)
        elif asked.cfg:
            hydra.show_cfg(name, words, asked.cfg, asked.package, asked.resolve)
        elif asked.info:
            hydra.show_info(asked.info, name, words)
        else:
            hydra.shell_completion(name, words)
    return True


def _hydra_flags() -> ArgumentParser:
    """Hydra's flags. Its own parser does not work with Python 3.14 (hydra#3121)."""
    parser = ArgumentParser(add_help=False)
    parser.add_argument("overrides", nargs="*", help="KEY=VALUE, GROUP=OPTION, +KEY=VALUE, ++KEY=VALUE, ~KEY")
    parser.add_argument(
        "--cfg", "-c", choices=("job", "hydra", "all"), help="Print the configuration: job, hydra or all"
    )
    parser.add_argument("--resolve", action="store_true", help="With --cfg: resolve ${...}")
    parser.add_argument("--package", "-p", help="With --cfg: the package to print")
    parser.add_argument(
        "--info", "-i", nargs="?", const="all", help="Print what Hydra knows: all, config, defaults, ..."
    )
    parser.add_argument("--run", "-r", action="store_true", help="Run one job")
    parser.add_argument("--multirun", "-m", action="store_true", help="Run a sweep")
    parser.add_argument("--config-name", "-cn", help="Name of the main configuration")
    parser.add_argument("--config-dir", "-cd", help="Directory to search first")
    parser.add_argument("--shell-completion", "-sc", action="store_true", help="Print what a shell evaluates")
    parser.add_argument("--hydra-help", action="store_true", help="Print this help")
    return parser


def asks_for_a_sweep(flags: Sequence[str], overrides: list[str]) -> bool:
    """Whether a file says hydra.mode: MULTIRUN. False if nothing can be composed, which is reported later."""
    try:
        cfg = composer(flags, mode=RunMode.MULTIRUN)(overrides)
    except (HydraException, OmegaConfBaseException, RunnerError):
        return False
    return bool(cfg.hydra.mode == RunMode.MULTIRUN)


def known_keys() -> list[str]:
    """Every dotted key of the default configuration."""
    return [key for key in validate.all_keys(composer([])([])) if not key.startswith("hydra")]


def name_data(cfg: DictConfig, hydra: DictConfig | None = None) -> None:
    """Name data without a name after its file in conf/data/. hydra: Hydra's settings (None: those of the running job)."""
    if cfg.data.name is None:
        cfg.data.name = (hydra or HydraConfig.get()).runtime.choices.get("data")


def composed_with(compose: Compose, overrides: Sequence[str]) -> DictConfig:
    cfg = compose(list(overrides))
    HydraConfig.instance().set_config(cfg)
    name_data(cfg)
    del cfg.hydra
    return cfg

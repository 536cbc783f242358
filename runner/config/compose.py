"""Composes the configuration from flags and overrides: Hydra, with our schema, search path and checks."""

from __future__ import annotations

import argparse
import inspect
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import hydra
from hydra._internal.callbacks import Callbacks
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.core_plugins.file_config_source import FileConfigSource
from hydra._internal.hydra import Hydra
from hydra._internal.sources_registry import SourcesRegistry
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.hydra_config import HydraConfig
from hydra.core.plugins import Plugins
from hydra.errors import ConfigCompositionException, HydraException
from hydra.plugins.config_source import ConfigResult
from hydra.plugins.search_path_plugin import SearchPathPlugin
from hydra.types import HydraContext, RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import logs, other_target, schema, secrets, trust, untrusted, validate
from runner.config.defaults import CONF as CONF
from runner.config.identity import REMOVED
from runner.config.run_files import MAX_ALIASED_VALUES, yaml_refusal
from runner.errors import Problem, RunnerError, harmless, refuse

Compose = Callable[[list[str]], DictConfig]

#: how Hydra begins its complaint about what stands in a file
IN_A_FILE = re.compile(r"In '(?P<name>.*)': \w+ raised while composing config:")
#: and about what a sweep takes, and one run does not
OF_ONE_RUN = ("Ambiguous value for argument", "Sweep parameters", "You must specify")

COMPLETE = {"-sc", "--shell-completion"}

_load = ConfigLoaderImpl.load_configuration
_SIGNATURE = inspect.signature(_load)
_mode = Hydra.get_mode


class WrongFile(ConfigCompositionException):
    """A file of conf/ that does not fit in; Hydra's message tells its name and the key, and this where they stand."""

    def __init__(
        self,
        message: str,
        *,
        name: str,
        key: str,
        package: str,
        parent: str,
        file: Path | None,
        parent_file: Path | None,
    ) -> None:
        """name, parent: as Hydra calls the file, and the one whose defaults have it. package: the key that it lies below."""
        super().__init__(message)
        self.name, self.key, self.package, self.file = name, key, package, file
        self.parent, self.parent_file = parent, parent_file


@contextmanager
def hydra_session(argv: list[str]) -> Iterator[None]:
    """Hydra with our schema and search path, raising its errors instead of printing them; as it was before, afterwards.

    Whatever Hydra composes in it is examined before Hydra starts a log or a callback.
    """
    schema.register()
    if OwnConf not in Plugins.instance().discover(SearchPathPlugin):
        Plugins.instance().register(OwnConf)
        SourcesRegistry.instance().types["file"] = CheckedFiles  # register() replaces none
    once = _Once(completes=bool(COMPLETE & {*argv}))
    before = sys.argv, ConfigLoaderImpl.load_configuration, Hydra.get_mode
    with restored("HYDRA_FULL_ERROR"), _help_made_when_shown(), _searching(argv) as words:
        sys.argv, os.environ["HYDRA_FULL_ERROR"] = words, "1"
        ConfigLoaderImpl.load_configuration = (  # type: ignore[method-assign]  # Hydra has no place for it
            lambda loader, *settings, **more: once.compose(loader, *settings, **more)
        )
        Hydra.get_mode = lambda hydra, *settings, **more: once.mode(hydra, *settings, **more)  # type: ignore[method-assign]
        try:
            yield
        finally:
            sys.argv, ConfigLoaderImpl.load_configuration, Hydra.get_mode = before  # type: ignore[method-assign]


@contextmanager
def _help_made_when_shown() -> Iterator[None]:
    """Python 3.14's argparse reads each help text when an argument is added; one of Hydra 1.3's is no text yet, and Hydra
    did not start there (hydra#3121)."""
    parsers: Any = argparse._ActionsContainer
    check = getattr(parsers, "_check_help", None)
    if check is not None:
        parsers._check_help = lambda parser, action: isinstance(action.help, str) and check(parser, action)
    try:
        yield
    finally:
        if check is not None:
            parsers._check_help = check


class _Once:
    def __init__(self, *, completes: bool) -> None:
        """completes: for a shell, where a person's code is not imported, and nothing printed."""
        self.kept: tuple[str | None, list[str], DictConfig | Exception] | None = None  # or why it can't be composed
        self._completes = completes
        self._said: set[str] = set()

    def mode(self, hydra: Hydra, config_name: str | None, overrides: list[str]) -> RunMode | None:
        """As Hydra.get_mode."""
        words = [*overrides, f"hydra.mode={RunMode.RUN.name}"]  # that is how Hydra composes, where nothing says so
        try:
            cfg = hydra.compose_config(config_name, overrides, RunMode.RUN)
        except Exception as error:  # a mistake, or of a sweep alone
            self.kept = config_name, words, error
            return _mode(hydra, config_name, overrides) if str(error).startswith(OF_ONE_RUN) else None
        said: RunMode | None = cfg.hydra.mode
        if said is not None:
            return said
        cfg.hydra.mode = RunMode.RUN
        cfg.hydra.overrides.hydra.append(words[-1])
        self.kept = config_name, words, cfg
        return None

    def compose(
        self,
        loader: ConfigLoaderImpl,
        config_name: str | None,
        overrides: list[str],
        run_mode: RunMode,
        *settings: Any,
        **more: Any,
    ) -> DictConfig:
        """As ConfigLoaderImpl.load_configuration, examined."""
        if self.kept is None or run_mode != RunMode.RUN or not self._is_kept(config_name, overrides):

            def load(words: list[str]) -> DictConfig:
                return _examined(loader, config_name, words, run_mode, *settings, **more)

            if self._completes:
                return load(overrides)
            cfg = other_target.with_arguments(load, overrides)
            self._leave_out(cfg, loader, overrides)
            return cfg
        found = self.kept[2]
        if isinstance(found, Exception):  # kept: who explains it tries word after word, and comes to the same
            raise found
        self.kept = None
        return found

    def _leave_out(self, cfg: DictConfig, loader: ConfigLoaderImpl, overrides: list[str]) -> None:
        other_target.simplify(cfg)
        other_target.name_data(cfg, lambda name: _file_of(loader, name))
        for line in other_target.leave_out(cfg, overrides, lambda name: _file_of(loader, name)):
            if line not in self._said:
                print(harmless(line), file=sys.stderr)  # stdout may be a file that --cfg job is kept in
            self._said.add(line)

    def _is_kept(self, config_name: str | None, overrides: list[str]) -> bool:
        assert self.kept is not None
        name, words, found = self.kept
        asked = (words, words[:-1]) if isinstance(found, Exception) else (words,)
        return name == config_name and overrides in asked


def _examined(loader: ConfigLoaderImpl, config_name: str | None, *settings: Any, **more: Any) -> DictConfig:
    """Composes as Hydra does.

    Raises: RunnerError for what would call code that is not allowed (runner.config.trust), and for a log that can't be made;
    WrongFile.
    """
    name = (config_name or "").removesuffix(".yaml")
    found, first = [], None
    if name == trust.RERUN:
        first = _file_of(loader, name)
        found = trust.rerun_problems(first) or untrusted.rerun_problems(first) if first is not None else []
    if not found:
        words = _SIGNATURE.bind(loader, config_name, *settings, **more).arguments["overrides"]
        secrets.note_secrets_in(words)
        try:
            cfg = _load(loader, config_name, *settings, **more)
        except ConfigCompositionException as error:
            raise _with_its_file(error, loader, config_name, *settings, **more) from error.__cause__
        found = trust.hydra_problems(cfg.hydra) or logs.problems(cfg.hydra)
        if first is not None:
            found += untrusted.take_no_store(cfg, first, words)
        secrets.note_secrets_of(cfg)
    refuse(found)
    return cfg


def _with_its_file(
    error: ConfigCompositionException, loader: ConfigLoaderImpl, config_name: str | None, *settings: Any, **more: Any
) -> ConfigCompositionException:
    told, cause = IN_A_FILE.match(str(error)), error.__context__
    if told is None or not isinstance(cause, OmegaConfBaseException):
        return error
    words = _SIGNATURE.bind(loader, config_name, *settings, **more).arguments
    defaults = loader.compute_defaults_list(config_name, words["overrides"], words["run_mode"]).defaults
    default = next(default for default in defaults if default.config_path == told["name"])
    parent = default.parent or ""
    return WrongFile(
        str(error),
        name=told["name"],
        key=str(cause.full_key or cause.key),
        package=default.package or "",
        parent=parent,
        file=_file_of(loader, told["name"]),
        parent_file=_file_of(loader, parent),
    )


def _file_of(loader: ConfigLoaderImpl, name: str) -> Path | None:
    places = (Path(item.path.removeprefix("file://")) for item in loader.get_search_path().get_path() if item.path)
    return next((file for place in places if (file := place / f"{name}.yaml").is_file()), None)


def composer(flags: list[str], *, mode: RunMode = RunMode.RUN) -> Compose:
    """Composes as the command line with these flags would, without running anything.

    mode: MULTIRUN for what a sweep's jobs have in common; its words with several values are left out.
    """
    schema.register()

    def compose(overrides: list[str]) -> DictConfig:
        with _initialized(flags) as composing:
            return composing.compose_config(
                _name(flags), overrides, mode, from_shell=False, with_log_configuration=False
            )

    return compose


@contextmanager
def _initialized(flags: list[str]) -> Iterator[Hydra]:
    with _searching(flags), hydra.initialize_config_dir(str(CONF), version_base="1.3"):
        composing = GlobalHydra.instance().hydra
        assert composing is not None
        yield composing


@contextmanager
def _searching(words: list[str]) -> Iterator[list[str]]:
    """Searches the directory of --config-dir first; yields the arguments without it, as Hydra searches it after conf/."""
    rest, directory = _split_off(words, "-cd", "--config-dir")
    before = OwnConf.named, OwnConf.is_data
    if directory is None or not Path(directory).is_dir():  # which Hydra reports
        rest, OwnConf.named = words, None
    else:
        OwnConf.named, OwnConf.is_data = Path(directory).absolute(), _name(words) == trust.RERUN
    try:
        yield rest
    finally:
        OwnConf.named, OwnConf.is_data = before


def _name(words: list[str]) -> str:
    return (_split_off(words, "-cn", "--config-name")[1] or "config").removesuffix(".yaml")


def _split_off(words: list[str], *flags: str) -> tuple[list[str], str | None]:
    rest, value, given = [], None, iter(words)
    for word in given:
        name, equals, text = word.partition("=")
        if name in flags:
            value = text if equals else next(given, None)
        else:
            rest.append(word)
    return rest, value


@contextmanager
def sweep_context(flags: list[str], overrides: list[str]) -> Iterator[tuple[HydraContext, DictConfig]]:
    """What Hydra gives a sweeper: the context, and what all jobs have in common; of a command that runs a sweep of its own."""
    with hydra_session(["runner"]):
        config = composer(flags, mode=RunMode.MULTIRUN)(overrides)
        HydraConfig.instance().set_config(config)
        OmegaConf.set_readonly(config.hydra, None)  # as Hydra's own multirun()
        with _initialized(flags) as composing:
            yield HydraContext(config_loader=composing.config_loader, callbacks=Callbacks(config)), config


def asks_for_a_sweep(flags: list[str], overrides: list[str]) -> bool:
    """Whether a file says hydra.mode: MULTIRUN. False where nothing composes, which is told later."""
    with hydra_session(["runner"]):
        try:
            cfg = composer(flags, mode=RunMode.MULTIRUN)(overrides)
        except (HydraException, OmegaConfBaseException, RunnerError):
            return False
    return bool(cfg.hydra.mode == RunMode.MULTIRUN)


def config_groups() -> str:
    """Return the config groups with their options, one per line."""
    schema.register()
    with _initialized([]) as composing:
        return composing.format_config_groups(lambda group: group.partition("/")[0] != "hydra")


def known_keys() -> list[str]:
    """Every dotted key of the default configuration."""
    return [key for key in validate.all_keys(composer([])([])) if not key.startswith("hydra")]


def name_data(cfg: DictConfig, hydra: DictConfig | None = None) -> None:
    """Data without a name is called as its file in conf/data/. hydra: Hydra's settings (None: those of the running job)."""
    if cfg.data.name is None:
        cfg.data.name = (hydra or HydraConfig.get()).runtime.choices.get("data")


class CheckedFiles(FileConfigSource):
    """Hydra's reader of files; refuses endless aliases, and drops the null values of removed keys from a run's rerun.yaml."""

    def load_config(self, config_path: str) -> ConfigResult:
        file = Path(self.path, self._normalize_file_name(config_path))
        if why := yaml_refusal(file, max_values=MAX_ALIASED_VALUES):
            raise RunnerError(Problem(str(file), why, f"the values in {file.name} instead of aliases"))
        found = super().load_config(config_path)
        for key in REMOVED if file.stem == trust.RERUN else ():
            section, _, name = key.rpartition(".")
            node = OmegaConf.select(found.config, section) if OmegaConf.is_dict(found.config) else None
            if not isinstance(node, DictConfig) or name not in node:
                continue
            if node[name] is not None:
                problem = f"{key} was removed: a model is on one device"
                raise RunnerError(Problem(f"{key} in {file}", problem, f"write `{name}: null` in that file"))
            del node[name]
        return found


class OwnConf(SearchPathPlugin):
    """Searches the directory of --config-dir first, then the current one's conf/, then the built-in one (hydra#2758)."""

    named: Path | None = None
    is_data = False  # a run's directory: files of that name in conf/ win

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if self.named is not None and self.is_data:
            search_path.append("command-line", f"file://{self.named}")
        elif self.named is not None:
            search_path.prepend("command-line", f"file://{self.named}", anchor="main")
        own = Path.cwd() / "conf"
        if own.is_dir() and not own.samefile(CONF):
            search_path.prepend("own", f"file://{own}", anchor="main")


def composed_with(compose: Compose, overrides: Sequence[str]) -> DictConfig:
    cfg = compose(list(overrides))
    HydraConfig.instance().set_config(cfg)
    name_data(cfg)
    del cfg.hydra
    return cfg


def make_own_code_importable() -> None:
    """`runner` finds the person's modules in the current folder as `python -m runner` does."""
    here = str(Path.cwd())
    if not sys.flags.safe_path and here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


@contextmanager
def restored(variable: str) -> Iterator[None]:
    """An environment variable is as it was, afterwards."""
    before = os.environ.get(variable)
    try:
        yield
    finally:
        os.environ.pop(variable, None)
        if before is not None:
            os.environ[variable] = before

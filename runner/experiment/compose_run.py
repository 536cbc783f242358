"""Composes a configuration for commands that make no run: from arguments (`lr-find`), or that of a run (`evaluate`)."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf, open_dict

from runner.config import override_errors
from runner.config.compose import composer, name_data
from runner.config.identity import key_of
from runner.errors import RunnerError, first_line
from runner.experiment.check import check_here


def composed(flags: Sequence[str], overrides: Sequence[str]) -> tuple[DictConfig, Path]:
    """The configuration, checked but for its device, and the folder that Hydra would give to a run of it.

    Raises: RunnerError with everything that is wrong.
    """
    compose = composer(list(flags))
    with override_errors.explained(overrides, compose=compose, check=check_here):
        cfg = compose(list(overrides))
        folder = Path(cfg.hydra.run.dir).absolute()
        HydraConfig.instance().set_config(cfg)
        name_data(cfg)
        del cfg.hydra
    return cfg, folder


def of_run(folder: Path, overrides: Sequence[str]) -> DictConfig:
    """The configuration of a run with other values; `data=NAME` takes all of the data from that file.

    Raises: RunnerError with everything that is wrong.
    """
    of_data = [word for word in overrides if key_of(word) == "data" or key_of(word).startswith("data.")]
    is_another_file = any(key_of(word) == "data" for word in of_data)
    others = [word for word in overrides if word not in of_data] if is_another_file else list(overrides)
    cfg, _ = composed(["-cd", str(folder), "-cn", "rerun"], [*others, "tracking.enabled=false"])  # no run comes of it
    if is_another_file:
        other, _ = composed([], of_data)
        with open_dict(cfg):
            cfg.data = OmegaConf.to_container(other.data, resolve=False)
    return cfg


def last_value(overrides: Sequence[str], key: str) -> Any:
    """Return the value of the last override of a key, as YAML reads it, or None. Raises: RunnerError."""
    given = [word.lstrip("+") for word in overrides if key_of(word) == key and word[0] != "~"]
    try:
        return OmegaConf.select(OmegaConf.from_dotlist([given[-1]]), key) if given else None
    except Exception as error:  # OmegaConf's or YAML's
        problem = f"the value can't be read: {first_line(error)}"
        raise RunnerError.of(given[-1], problem, f"put it in quotes: `'{key}=...'`") from None

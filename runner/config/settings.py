"""The checked configuration as plain values, made once per run. Training gets these and sees no configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from runner.config import schema
from runner.config.identity import chosen
from runner.errors import Problem, first_line, refuse

SECTIONS = ("train", "metrics", "placement", "tracking")


@dataclass(frozen=True)
class Settings:
    """The keys of conf/ that have no target. The schema's classes stay unfrozen: Hydra merges into them."""

    seed: int
    name: str | None
    model: str  # the name of its class
    train: schema.Train
    metrics: schema.Metrics
    placement: schema.Placement
    tracking: schema.Tracking
    experiment: Mapping[str, Any]  # config.identity.chosen()

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """Raise a RunnerError for a value that refers to a fact of the data."""
        found: dict[str, Any] = {}
        problems = []
        for key in SECTIONS:
            try:
                found[key] = OmegaConf.to_object(cfg[key])
            except OmegaConfBaseException as error:
                problem = f"the value is known only when the data is there ({first_line(error)})"
                source, fix = getattr(error, "full_key", None) or key, "set it to a value without a reference"
                problems.append(Problem(source, problem, fix, code="missing-value"))
        refuse(problems)
        model = str(cfg.model.get("_target_", "model")).rsplit(".", 1)[-1]
        return cls(seed=cfg.seed, name=cfg.name, model=model, experiment=chosen(cfg), **found)

"""The checked configuration as plain values, made once per run. Training gets these and sees no configuration."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from runner.config import schema
from runner.config.identity import chosen

SECTIONS = ("train", "metrics", "placement", "tracking")


@dataclass(frozen=True)
class Settings:
    """The keys of conf/ that have no target. The schema's classes stay unfrozen: Hydra merges into them."""

    seed: int
    name: str | None
    model: str  # the name of its class
    train: schema.TrainKeys
    metrics: schema.MetricsKeys
    placement: schema.PlacementKeys
    tracking: schema.TrackingKeys
    experiment: Mapping[str, Any]  # config.identity.chosen()

    @classmethod
    def of(cls, cfg: DictConfig) -> Settings:
        """Return the settings of a checked configuration."""
        sections: dict[str, Any] = {key: OmegaConf.to_object(cfg[key]) for key in SECTIONS}
        model = str(cfg.model.get("_target_", "model")).rsplit(".", 1)[-1]
        return cls(seed=cfg.seed, name=cfg.name, model=model, experiment=chosen(cfg), **sections)

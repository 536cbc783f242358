"""Trains what experiment/build.py has built: the loop, its steps, evaluation, checkpoints, and metrics kept on the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: the public names: what configurations and other programs may name
if TYPE_CHECKING:
    from runner.training.lora import add_lora as add_lora
    from runner.training.muon import Muon as Muon
    from runner.training.schedule import warmup_cosine as warmup_cosine
else:
    from runner.config.allowed import exports

    __getattr__, __dir__, __all__ = exports(__name__)

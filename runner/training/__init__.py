"""Parts go in, a trained model comes out: loop, step, evaluation, checkpoints, metrics."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: public name -> the module that defines it
HOMES = {
    "warmup_cosine": "optimizer",
}
__all__ = [*HOMES]

if TYPE_CHECKING:
    from runner.training.optimizer import warmup_cosine as warmup_cosine
else:
    from runner.config.exports import exports

    __getattr__, __dir__ = exports(__name__, HOMES)

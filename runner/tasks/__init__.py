"""Tasks: compute from a model and a batch on the device the loss to learn from and what to report, as 0-d tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: the public names: what configurations and other programs may name
if TYPE_CHECKING:
    from runner.tasks.adversarial import Adversarial as Adversarial
    from runner.tasks.classification import Classification as Classification
    from runner.tasks.custom import Own as Own
    from runner.tasks.language import Language as Language
    from runner.tasks.regression import Autoencoding as Autoencoding
    from runner.tasks.regression import Regression as Regression
else:
    from runner.config.allowed import exports

    __getattr__, __dir__, __all__ = exports(__name__)

"""Plain torch modules, built from their sizes. Custom classes, named by `_target_`, are used in the same way."""

from __future__ import annotations

from typing import TYPE_CHECKING

#: the public names: what configurations and other programs may name
if TYPE_CHECKING:
    from runner.models.autoencoder import Autoencoder as Autoencoder
    from runner.models.cnn import CNN as CNN
    from runner.models.external import timm_model as timm_model
    from runner.models.external import transformers_model as transformers_model
    from runner.models.gan import GAN as GAN
    from runner.models.gpt import GPT as GPT
    from runner.models.linear import Linear as Linear
    from runner.models.mlp import MLP as MLP
    from runner.models.preprocessing import ImageInputs as ImageInputs
    from runner.models.preprocessing import Prepared as Prepared
    from runner.models.preprocessing import Scaled as Scaled
    from runner.models.preprocessing import TableColumns as TableColumns
    from runner.models.recurrent import Recurrent as Recurrent
    from runner.models.resnet import ResNet as ResNet
    from runner.models.transformer import Transformer as Transformer
    from runner.models.vit import ViT as ViT
else:
    from runner.config.allowed import exports

    __getattr__, __dir__, __all__ = exports(__name__)

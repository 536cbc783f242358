"""A generative adversarial network: a generator of rows, and a critic that distinguishes them from real ones."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from runner.config.checks import Count, Widths
from runner.models.mlp import MLP, Activation


class GAN(nn.Module):
    """Two multi-layer perceptrons (Goodfellow et al. 2014). Called with rows, it is the critic.

    `generator` and `critic` are the keys of optimizer.turns.
    """

    def __init__(
        self,
        in_features: int,
        latent_size: Count = 2,
        *,
        hidden_sizes: Widths = (128, 128),
        activation: Activation = "silu",
    ) -> None:
        super().__init__()
        self.latent_size = latent_size
        self.generator = MLP(self.latent_size, in_features, hidden_sizes, activation=activation)
        self.critic = MLP(in_features, 1, hidden_sizes, activation=activation)

    def generate(self, real: Tensor, *, draw: torch.Generator | None = None) -> Tensor:  # (B, ...) -> (B, ...)
        """Return as many rows as real ones, in their shape. draw: the random generator (None: the default one)."""
        latents = torch.randn(len(real), self.latent_size, device=real.device, generator=draw)
        rows: Tensor = self.generator(latents)
        return rows.view(real.shape)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, ...) -> (B, 1)
        logits: Tensor = self.critic(inputs)
        return logits

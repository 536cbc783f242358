"""Generate a sample text with a language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from runner.errors import RunnerError

TEMPERATURE = 0.8


class Text(Protocol):
    """Converts between text and tokens: the reader of data=text."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


def sample(model: nn.Module, reader: Text, *, prompt: str = "\n", num_tokens: int = 500, seed: int = 0) -> str:
    """Return a sample text that begins with the prompt, or with token 0 if the vocabulary lacks it. Waits for the device once."""
    try:
        beginning = reader.encode(prompt) or [0]
    except RunnerError:
        beginning = [0]
    device = next(model.parameters(), torch.empty(0)).device
    draw = torch.Generator().manual_seed(seed)
    tokens = generate(model, torch.tensor([beginning], device=device), num_tokens, generator=draw)
    return reader.decode(tokens[0].tolist())


@torch.no_grad()
def generate(model: nn.Module, prompt: Tensor, num_tokens: int, *, generator: torch.Generator | None = None) -> Tensor:
    """Return (B, P + num_tokens): the prompt, (B, P) int64 on the model's device, and its continuation.

    Does not wait for the device. Costs a forward pass in eval mode per token. If a part of the model has a `context_length`,
    its input is at most that many last tokens.

    Args:
        generator: On the CPU; its numbers are drawn at once, so the text is the same on each device, up to rounding.
    """
    lengths = (getattr(module, "context_length", None) for module in model.modules())
    most = next((length for length in lengths if isinstance(length, int)), None)
    draws = torch.rand(num_tokens, len(prompt), 1, generator=generator).to(prompt.device)
    tokens = torch.cat([prompt, prompt.new_zeros(len(prompt), num_tokens)], 1)
    was_training = model.training
    model.eval()
    try:
        for end, draw in enumerate(draws, start=prompt.shape[1]):
            outputs = model(tokens[:, max(0, end - most) if most else 0 : end])
            logits = getattr(outputs, "logits", outputs)[:, -1].float()
            passed = (logits / TEMPERATURE).softmax(-1).cumsum(-1)
            # below the last value, the rounded sum, so that a token without probability is never drawn
            height = draw * passed[:, -1:] * (1 - 2**-20)
            tokens[:, end] = torch.searchsorted(passed, height, right=True)[:, 0]
    finally:
        model.train(was_training)
    return tokens

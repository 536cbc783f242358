"""Generate text with a language model, token by token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor, nn

from runner.errors import Problem, RunnerError, refuse


class Text(Protocol):
    """Converts between text and tokens: the reader of data=text."""

    def encode(self, text: str) -> list[int]: ...

    def decode(self, tokens: Sequence[int]) -> str: ...


@torch.no_grad()
def generate(
    model: nn.Module,
    prompt: Tensor,  # (B, P) int64, P >= 1, on the model's device
    num_tokens: int,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    generator: torch.Generator | None = None,
    context_length: int | None = None,
) -> Tensor:
    """Return (B, P + num_tokens): the prompt and its continuation. Does not wait for the device.

    Costs a forward pass in eval mode per token.

    Args:
        temperature: Of the logits; 0 takes the most likely token.
        top_k: Sample only from the most likely tokens.
        generator: On the CPU; its numbers are drawn at once, so the text is the same on each device, up to rounding.
        context_length: The number of last tokens in the model's input (None: the model's attribute, else all).

    Raises:
        RunnerError: For invalid settings.
    """
    _check(prompt, temperature, top_k)
    most = context_length or _context_length(model)
    draws = torch.rand(num_tokens, len(prompt), 1, generator=generator).to(prompt.device)
    tokens = torch.cat([prompt, prompt.new_zeros(len(prompt), num_tokens)], 1)
    was_training = model.training
    model.eval()
    try:
        for index, draw in enumerate(draws):
            end = prompt.shape[1] + index
            found = model(tokens[:, max(0, end - most) if most else 0 : end])
            logits = getattr(found, "logits", found)[:, -1].float()
            tokens[:, end] = logits.argmax(-1) if temperature == 0 else _drawn(logits / temperature, draw, top_k)
    finally:
        model.train(was_training)
    return tokens


def sample(
    model: nn.Module,
    reader: Text,
    *,
    prompt: str = "\n",
    num_tokens: int = 500,
    temperature: float = 0.8,
    top_k: int | None = None,
    seed: int = 0,
) -> str:
    """Return a sample text that begins with the prompt, or with token 0 if the vocabulary lacks it. Waits for the device once."""
    try:
        beginning = reader.encode(prompt) or [0]
    except RunnerError:
        beginning = [0]
    tokens = generate(
        model,
        torch.tensor([beginning], device=next(model.parameters(), torch.empty(0)).device),
        num_tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
    )
    return reader.decode(tokens[0].tolist())


def _drawn(logits: Tensor, draw: Tensor, top_k: int | None) -> Tensor:
    if top_k is not None and top_k < logits.shape[-1]:
        least = logits.topk(top_k).values[:, -1:]
        logits = logits.masked_fill(logits < least, -torch.inf)
    passed = logits.softmax(-1).cumsum(-1)
    # below the last value, the rounded sum, so that a token without probability is never drawn
    height = draw * passed[:, -1:] * (1 - 2**-20)
    return torch.searchsorted(passed, height, right=True)[:, 0]


def _context_length(model: nn.Module) -> int | None:
    found = (getattr(module, "context_length", None) for module in model.modules())
    return next((length for length in found if isinstance(length, int)), None)


def _check(prompt: Tensor, temperature: float, top_k: int | None) -> None:
    problems = []
    if prompt.dim() != 2 or not prompt.shape[1]:
        problem = "a prompt must be tokens of shape (B, P), at least one per row"
        problems.append(Problem(f"a prompt of shape {tuple(prompt.shape)}", problem, "use a prompt of shape (1, 1)"))
    if temperature < 0:
        problems.append(
            Problem.suggest(f"temperature={temperature}", "`temperature` must be 0 or more", ["temperature=1.0"])
        )
    if top_k is not None and top_k < 1:
        problems.append(
            Problem(f"top_k={top_k}", "`top_k` must be 1 or more", "use `top_k=null` for all tokens", code="bad-value")
        )
    refuse(problems)

"""A decoder like GPT-2: logits of each next token, (B, T, V), from the tokens before it, (B, T) int64."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Count, Share
from runner.errors import RunnerError
from runner.models.attention import SPREAD, Positions, Stack, linear

#: maximum standard deviation of initial logits: a row of the embedding times a vector of length sqrt(width).
#: With tied weights the input token gets more, so a larger value starts with a higher loss
MAX_LOGIT = 0.1


class GPT(nn.Module):
    """A decoder like GPT-2: pre-norm, causal attention, GELU, and an output layer with the embedding's weights.

    The initial loss is ln(vocab_size), within 0.05. A block has 12 width**2 weights. Weight decay applies to all
    parameters, including biases and norms.
    """

    def __init__(
        self,
        vocab_size: int | None,
        context_length: int | None,
        width: Count = 256,
        depth: Count = 6,
        num_heads: Count = 8,
        *,
        dropout: Share = 0.0,
        positions: Positions = "learned",
        tie_weights: bool = True,
    ) -> None:
        super().__init__()
        if vocab_size is None or context_length is None:
            problem = "`gpt` needs tokens, and the data has no `vocab_size` and `context_length`"
            fix = "use `data=text` or `data=tokens`, or set `model.vocab_size` and `model.context_length`"
            raise RunnerError.of("model=gpt", problem, fix)
        self.vocab_size, self.context_length = vocab_size, context_length
        self.stack = Stack(
            context_length,
            width=width,
            depth=depth,
            num_heads=num_heads,
            dropout=dropout,
            positions=positions,
            is_causal=True,
        )
        self.embedding = nn.Embedding(vocab_size, width)
        spread = min(SPREAD, MAX_LOGIT / width**0.5)
        nn.init.normal_(self.embedding.weight, std=spread)
        self.output = None if tie_weights else linear(width, vocab_size, spread=spread)

    def forward(self, tokens: Tensor) -> Tensor:  # (B, T) -> (B, T, V), T <= context_length
        if tokens.shape[-1] > self.context_length:
            problem = f"the model has positions for {self.context_length:,} tokens"
            fix = f"use at most {self.context_length:,} tokens, or train with `data.context_length={tokens.shape[-1]}`"
            raise RunnerError.of(f"{tokens.shape[-1]:,} tokens in a row", problem, fix)
        x = self.stack(self.embedding(tokens))
        logits: Tensor = F.linear(x, self.embedding.weight) if self.output is None else self.output(x)
        return logits

"""A GRU or an LSTM over signals, (B, C, L), or tokens, (B, T), to (B, out_features)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Annotated

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from runner.config.checks import Count, Share, one_of
from runner.models.shapes import SIGNALS, check_shape

CELLS: dict[str, type[nn.GRU] | type[nn.LSTM]] = {"gru": nn.GRU, "lstm": nn.LSTM}
POOLINGS = ("last", "mean", "each")


class Recurrent(nn.Module):
    """A GRU or LSTM over a sequence, and a linear map of its state.

    A signal, (C, L), is a sequence of L steps of C numbers; tokens, (T,), go through an embedding of hidden_size if
    vocab_size is set. Orthogonal recurrent weights, LeCun-normal others, zero biases except the LSTM's forget gate: 1
    (Jozefowicz et al. 2015).

    Args:
        pooling: `last`, the final state of each direction; `mean`, the mean over all steps; `each`, the outputs of every
            step, (B, L, out_features), for language models.
        padding_token: Steps with this token at the end of a text are ignored; None for texts of one length.
    """

    def __init__(
        self,
        input_shape: Sequence[int],
        out_features: int,
        cell: Annotated[str, one_of(CELLS)] = "gru",
        hidden_size: Count = 128,
        *,
        num_layers: Count = 1,
        bidirectional: bool = False,
        pooling: Annotated[str, one_of(POOLINGS)] = "last",
        dropout: Share = 0.0,
        vocab_size: int | None = None,
        padding_token: int | None = None,
    ) -> None:
        super().__init__()
        self.padding_token = padding_token
        self.pooling = pooling
        check_shape(input_shape, model=cell, takes=[SIGNALS], vocab_size=vocab_size, takes_tokens=True)
        if vocab_size is not None:
            self.embedding: nn.Embedding | None = nn.Embedding(vocab_size, hidden_size)
            width = hidden_size
        else:
            self.embedding, width = None, input_shape[0]
        self.layers: nn.GRU | nn.LSTM | _BothWays
        if bidirectional and padding_token is not None and vocab_size is not None:
            self.layers = _BothWays(CELLS[cell], width, hidden_size, num_layers, dropout=dropout)
        else:
            self.layers = CELLS[cell](
                width,
                hidden_size,
                num_layers,
                batch_first=True,
                bidirectional=bidirectional,
                dropout=dropout if num_layers > 1 else 0.0,  # between layers; another one is before the output
            )
        for layers in self.layers.modules():
            if isinstance(layers, nn.GRU | nn.LSTM):
                _initialise(layers)
        self.dropout = nn.Dropout(dropout)
        self.output = nn.Linear(hidden_size * (2 if bidirectional else 1), out_features)
        nn.init.kaiming_normal_(self.output.weight, nonlinearity="linear")
        nn.init.zeros_(self.output.bias)

    def forward(self, inputs: Tensor) -> Tensor:  # (B, C, L) or (B, T) -> (B, out_features), or (B, L, out_features)
        steps = inputs.transpose(1, 2) if self.embedding is None else self.embedding(inputs)  # (B, L, C)
        if steps.device.type == "mps":  # of a view its LSTM gives the wrong gradient (pytorch#175189)
            steps = steps.contiguous()
        is_there = None  # (B, L); None where nothing fills rows up
        if self.padding_token is not None and self.embedding is not None:
            is_there = inputs != self.padding_token
        states, end = self._run(steps, is_there)
        if is_there is not None and self.pooling != "each":
            states = self._of_text(states, is_there)
        elif self.pooling == "last":
            states = end
        elif self.pooling == "mean":
            states = states.mean(1)
        output: Tensor = self.output(self.dropout(states))
        return output

    def _run(self, steps: Tensor, is_there: Tensor | None) -> tuple[Tensor, Tensor]:
        if isinstance(self.layers, _BothWays):
            states: Tensor = self.layers(steps, is_there)
            size = self.layers.hidden_size
            return states, torch.cat([states[:, -1, :size], states[:, 0, size:]], 1)
        states, end = self._one_by_one(self.layers, steps) if self._has_problems(steps) else self.layers(steps)
        last = end[0] if isinstance(end, tuple) else end  # (layers * D, B, H); of an LSTM (state, cell)
        num_directions = 2 if self.layers.bidirectional else 1
        return states, torch.cat(last[-num_directions:].unbind(0), -1)

    def _of_text(self, states: Tensor, is_there: Tensor) -> Tensor:  # (B, L, D * H), (B, L) -> (B, D * H)
        lengths = is_there.sum(1, keepdim=True).clamp(min=1)
        if self.pooling == "mean":
            return (states * is_there[..., None]).sum(1) / lengths
        size = self.layers.hidden_size
        at = (lengths - 1)[..., None].expand(-1, 1, size)
        forward = states[..., :size].gather(1, at)[:, 0]
        return torch.cat([forward, states[:, 0, size:]], 1)

    def _has_problems(self, steps: Tensor) -> bool:
        """Return whether MPS' LSTM ignores its dropout in the backward pass (pytorch#190056)."""
        is_deep = isinstance(self.layers, nn.LSTM) and self.layers.num_layers > 1 and self.layers.dropout > 0
        return is_deep and self.training and steps.device.type == "mps"

    def _one_by_one(self, layers: nn.GRU | nn.LSTM, steps: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        num_directions = 2 if layers.bidirectional else 1
        weights: list[Tensor] = list(layers.parameters())
        each = len(weights) // layers.num_layers
        begin = steps.new_zeros(num_directions, len(steps), layers.hidden_size)
        hidden, cells = [], []
        for layer in range(layers.num_layers):
            own = weights[layer * each : (layer + 1) * each]
            steps, state, cell = torch.lstm(
                steps.contiguous(), (begin, begin), own, True, 1, 0.0, True, layers.bidirectional, True
            )
            hidden.append(state)
            cells.append(cell)
            if layer < layers.num_layers - 1:
                steps = F.dropout(steps, layers.dropout)
        return steps, (torch.cat(hidden), torch.cat(cells))


class _BothWays(nn.Module):
    """Both directions of a GRU or LSTM over padded texts; the backward one starts at the end of each text.

    torch's bidirectional layer starts at the end of the row, or needs the lengths on the host.
    """

    def __init__(
        self, cell: type[nn.GRU] | type[nn.LSTM], width: int, hidden_size: int, num_layers: int, *, dropout: float
    ) -> None:
        super().__init__()
        self.hidden_size, self.dropout = hidden_size, dropout
        widths = [width, *([2 * hidden_size] * (num_layers - 1))]
        self.layers = nn.ModuleList(
            nn.ModuleList(cell(each, hidden_size, batch_first=True) for _ in range(2)) for each in widths
        )

    def forward(self, steps: Tensor, is_there: Tensor | None) -> Tensor:  # (B, L, C), (B, L) -> (B, L, 2 * H)
        at = torch.arange(steps.shape[1], device=steps.device)
        lengths = steps.shape[1] if is_there is None else is_there.sum(1, keepdim=True).clamp(min=1)  # (B, 1)
        turned = torch.where(at < lengths, lengths - 1 - at, at)[..., None].expand(steps.shape[0], -1, 1)
        for number, layer in enumerate(self.layers):
            onward, back = layer.children()
            steps = F.dropout(steps, self.dropout, self.training and number > 0)
            backward = _in_order(back(_in_order(steps, turned))[0], turned)
            steps = torch.cat([onward(steps)[0], backward], -1)
        return steps


def _in_order(steps: Tensor, places: Tensor) -> Tensor:  # (B, L, C), (B, L, 1)
    return steps.gather(1, places.expand(-1, -1, steps.shape[-1]))


def _initialise(layers: nn.GRU | nn.LSTM) -> None:
    for name, values in layers.named_parameters():
        if "weight_hh" in name:
            for gate in values.data.split(layers.hidden_size):
                nn.init.orthogonal_(gate)
        elif "weight_ih" in name:
            nn.init.normal_(values, std=1 / math.sqrt(values.shape[1]))
        else:
            nn.init.zeros_(values)
            if isinstance(layers, nn.LSTM) and "bias_ih" in name:  # the gates: input, forget, cell, output
                values.data[layers.hidden_size : 2 * layers.hidden_size] = 1

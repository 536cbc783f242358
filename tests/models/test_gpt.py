import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from runner.models.gpt import GPT

POSITIONS = ["learned", "rotary"]


def small(**settings):
    torch.manual_seed(0)
    return GPT(**{"vocab_size": 11, "context_length": 12, "width": 16, "depth": 2, "num_heads": 2, **settings})


@pytest.mark.parametrize("positions", POSITIONS)
def test_a_later_token_changes_no_earlier_logit(positions):
    model = small(positions=positions).eval()
    tokens = torch.randint(11, (3, 12))
    before = model(tokens)
    assert before.shape == (3, 12, 11)
    for at in range(12):
        changed = tokens.clone()
        changed[:, at] = (changed[:, at] + 1) % 11
        after = model(changed)
        assert torch.equal(after[:, :at], before[:, :at])
        assert (after[:, at:] != before[:, at:]).any(-1).all(), "each from there on"


@pytest.mark.parametrize("positions", POSITIONS)
def test_order_of_earlier_tokens_counts(positions):
    model = small(positions=positions).eval()
    there, back = model(torch.tensor([[1, 2, 3, 4]])), model(torch.tensor([[2, 1, 3, 4]]))
    assert (there[0, -1] - back[0, -1]).abs().max() > 1e-6


def test_rotary_positions_depend_only_on_distances():
    model = small(positions="rotary", depth=1).eval()
    seen = model.stack.blocks[0].rotary(torch.ones(1, 1, 12, 8))[0, 0]
    products = seen @ seen.T
    for distance in range(12):
        diagonal = products.diagonal(distance)
        assert torch.allclose(diagonal, diagonal[0].expand_as(diagonal), atol=1e-5)
    assert products[0, 0] > products[0, 1] > products[0, 2]


@pytest.mark.parametrize(
    ("vocab_size", "sizes", "positions", "tie"),
    [
        (65, (256, 2, 8), "learned", True),
        (27, (96, 3, 4), "rotary", True),
        (1000, (128, 1, 4), "learned", False),
        (2, (32, 1, 1), "rotary", False),
    ],
)
def test_initial_loss_is_log_of_vocabulary(vocab_size, sizes, positions, tie):
    torch.manual_seed(1)
    width, depth, num_heads = sizes
    model = GPT(vocab_size, 64, width, depth, num_heads, positions=positions, tie_weights=tie)
    tokens = torch.randint(vocab_size, (16, 65))
    with torch.no_grad():
        loss = F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten())
    assert loss.item() == pytest.approx(math.log(vocab_size), abs=0.05)


def test_weights_have_their_spread_and_tie():
    sizes = {"width": 128, "depth": 8, "num_heads": 4, "vocab_size": 500}
    model = small(**sizes)
    block = model.stack.blocks[3]
    assert block.queries_keys_values.weight.std().item() == pytest.approx(0.02, rel=0.02)
    assert block.hidden.weight.std().item() == pytest.approx(0.02, rel=0.02)
    for layer in (block.attended, block.output):
        assert layer.weight.std().item() == pytest.approx(0.02 / math.sqrt(16), rel=0.02)
    assert all((layer.bias == 0).all() for layer in model.modules() if isinstance(layer, nn.Linear))
    per_block = 12 * 128**2 + 13 * 128
    assert sum(p.numel() for p in model.parameters()) == 8 * per_block + (500 + 12 + 2) * 128
    untied = small(**sizes, tie_weights=False)
    assert sum(p.numel() for p in untied.parameters()) == 8 * per_block + (2 * 500 + 12 + 2) * 128 + 500


@pytest.mark.parametrize("positions", POSITIONS)
def test_gpt_learns_what_needs_memory(positions):
    model = small(positions=positions, width=32)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    draw = torch.Generator().manual_seed(0)
    for _ in range(110):
        tokens = torch.randint(11, (32, 3), generator=draw).repeat(1, 4)
        loss = F.cross_entropy(model(tokens)[:, 3:-1].flatten(0, 1), tokens[:, 4:].flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert loss.item() < 0.5 < math.log(11)

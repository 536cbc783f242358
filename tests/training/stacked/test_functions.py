"""torch's functions give the same results for several models together as for each separately."""

import pytest
import torch
from torch.func import vmap
from torch.nn import functional as F

from runner.training.stacked.stack import MembersFunctions

HIDDEN = torch.tensor([[True, False], [False, False], [True, True]])


@pytest.mark.parametrize("mask", [HIDDEN, torch.zeros(3, 2).masked_fill(~HIDDEN, -torch.inf)], ids=["words", "numbers"])
def test_attention_to_nothing_has_finite_gradients(mask):
    draw = torch.Generator().manual_seed(0)
    own = [torch.randn(2, 1, rows, 4, generator=draw, requires_grad=True) for rows in (3, 2, 2)]  # of two members

    def attend(query, key, value):
        return F.scaled_dot_product_attention(query, key, value, attn_mask=mask)

    alone = attend(*own)
    expected = torch.autograd.grad(alone.square().sum(), own)
    functions = MembersFunctions(channels_last=False)
    functions.generators = [torch.Generator(), torch.Generator()]
    with functions:
        together = vmap(attend)(*own)
    torch.testing.assert_close(together, alone)
    assert not together[:, :, 1].any()
    torch.testing.assert_close(torch.autograd.grad(together.square().sum(), own), expected)

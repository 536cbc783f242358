"""Attention as MPS needs it: the same numbers in another form."""

import pytest
import torch
from simulated import run_simulated
from torch.nn import functional as F

from runner.models import GPT, ViT, attention


@pytest.fixture
def seen(monkeypatch):
    """Record the arguments of torch's attention, as on MPS."""
    given = []
    usual = F.scaled_dot_product_attention

    def spy(query, key, value, **more):
        given.append(((query, key, value), more))
        return usual(query, key, value, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "_has_problems", lambda tensor: True)
    return given


def three():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 5, 4, 8, generator=generator).transpose(2, 3).unbind(0)  # (B, H, T, D), from a permutation


def test_causal_mask_is_written_out_on_mps(seen):
    query, key, value = three()
    expected = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(attention.attend(query, key, value, is_causal=True), expected, atol=1e-6, rtol=0)
    tensors, more = seen[-1]
    assert not more["is_causal"] and more["attn_mask"].shape == (2, 4, 5, 5)
    assert torch.equal(more["attn_mask"][0, 0], torch.ones(5, 5, dtype=torch.bool).tril())
    assert not query.is_contiguous() and all(tensor.is_contiguous() for tensor in (*tensors, more["attn_mask"]))


def test_a_mask_of_padding_is_whole(seen):
    query, key, value = three()
    mask = (torch.arange(5) < torch.tensor([[3], [5]]))[:, None, None]
    expected = F.scaled_dot_product_attention(query, key, value, attn_mask=mask)
    torch.testing.assert_close(attention.attend(query, key, value, mask=mask), expected, atol=1e-6, rtol=0)
    assert seen[-1][1]["attn_mask"].shape == (2, 4, 5, 5) and seen[-1][1]["attn_mask"].is_contiguous()


def test_elsewhere_it_is_torchs_own(seen, monkeypatch):
    monkeypatch.undo()
    assert not attention._has_problems(torch.zeros(1))
    query, key, value = three()
    assert torch.equal(
        attention.attend(query, key, value, is_causal=True),
        F.scaled_dot_product_attention(query, key, value, is_causal=True),
    )


def given_to_attention(device):
    """Return, for a GPT and a ViT, whether torch applies the causal mask, and whether its inputs are contiguous."""
    seen = []
    usual = attention.F.scaled_dot_product_attention

    def spy(*three, **more):
        seen.append([more["is_causal"], more["attn_mask"] is not None, all(part.is_contiguous() for part in three)])
        return usual(*three, **more)

    attention.F.scaled_dot_product_attention = spy
    GPT(11, 12, 16, 1, 2).to(device)(torch.zeros(2, 5, dtype=torch.int64, device=device))
    ViT((1, 8, 8), 5, width=16, depth=1, num_heads=2).to(device)(torch.zeros(3, 1, 8, 8, device=device))
    return seen


def test_models_attend_by_contiguous_tensors_on_mps():
    assert run_simulated("mps", given_to_attention) == [[False, True, True], [False, False, True]]

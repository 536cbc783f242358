"""Attention as MPS needs it: the same numbers, in another form."""

import pytest
import torch
from torch.nn import functional as F

from runner.models import attention


@pytest.fixture
def seen(monkeypatch):
    """What torch's attention was given, as on MPS."""
    given = []
    usual = F.scaled_dot_product_attention

    def spy(query, key, value, **more):
        given.append(((query, key, value), more))
        return usual(query, key, value, **more)

    monkeypatch.setattr(F, "scaled_dot_product_attention", spy)
    monkeypatch.setattr(attention, "_has_faults", lambda tensor: True)
    return given


def three():
    generator = torch.Generator().manual_seed(0)
    return torch.randn(3, 2, 5, 4, 8, generator=generator).transpose(2, 3).unbind(0)  # (B, H, T, D), of a permute


def test_a_causal_mask_is_written_out_and_says_the_same(seen):
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
    assert not attention._has_faults(torch.zeros(1))
    query, key, value = three()
    assert torch.equal(
        attention.attend(query, key, value, is_causal=True),
        F.scaled_dot_product_attention(query, key, value, is_causal=True),
    )

"""Dropout of the models here: the share that falls away, the mean, the layout, and where torch's own is taken."""

import pytest
import torch
from torch.nn import functional as F

from runner.models import attention
from runner.models.dropout import LEAST, Dropout, apply_dropout


@pytest.mark.parametrize("p", [0.5, 0.3, 0.01, LEAST / 2**17, 0.9999])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_so_many_fall_away_and_the_others_make_up_for_them(p, dtype):
    torch.manual_seed(0)
    ones = torch.ones(1001, 999, dtype=dtype, requires_grad=True)  # not four to a word
    dropped = apply_dropout(ones, p)
    share = (dropped == 0).double().mean().item()
    spread = (p * (1 - p) / ones.numel()) ** 0.5
    assert abs(share - p) < 4 * spread + 2**-17
    if p < 0.9 and dtype is torch.float64:
        assert dropped.unique().tolist() == pytest.approx([0, 1 / (1 - p)], rel=1e-5)
        assert (share and abs(dropped.mean().item() - 1)) < 4 * spread / (1 - p)
    dropped.sum().backward()
    assert torch.equal(ones.grad, dropped.detach()) and dropped.dtype == dtype


def test_neither_rows_nor_columns_nor_steps_hang_together():
    torch.manual_seed(0)
    one, other = (apply_dropout(torch.ones(512, 512), 0.5) / 2 for _ in range(2))
    for shift in [(0, 1), (1, 0), (0, 2), (0, 4), (1, 1)]:
        assert abs((one * one.roll(shift, (0, 1))).mean() - 0.25) < 4 * (3 / 16 / one.numel()) ** 0.5
    assert abs((one * other).mean() - 0.25) < 4 * (3 / 16 / one.numel()) ** 0.5
    for rows in (one.mean(0), one.mean(1)):
        assert rows.std() == pytest.approx(0.5 / 512**0.5, rel=0.2)


def test_the_same_seed_draws_the_same_whatever_the_layout():
    images = torch.randn(4, 3, 5, 7)
    last = images.to(memory_format=torch.channels_last)
    drawn = []
    for each in (images, last, images):
        torch.manual_seed(3)
        drawn.append(apply_dropout(each, 0.3))
    assert torch.equal(drawn[0], drawn[2]) and torch.equal(drawn[0], drawn[1])
    assert drawn[1].is_contiguous(memory_format=torch.channels_last)
    assert not torch.equal(apply_dropout(images, 0.3), drawn[0])


def test_where_nothing_is_trained_it_draws_nothing():
    values, before = torch.randn(3, 4), torch.get_rng_state()
    assert torch.equal(Dropout(0.3).eval()(values), values) and torch.equal(Dropout(0.0)(values), values)
    assert torch.equal(torch.get_rng_state(), before)


def test_a_compiled_step_has_torchs_own():
    graph = []

    def look(module, inputs):
        graph.extend(node.target for node in module.graph.nodes if node.op == "call_function")
        return module.forward

    torch.compile(Dropout(0.3), backend=look, fullgraph=True)(torch.randn(3, 4))
    assert graph == [F.dropout]


@pytest.mark.parametrize("mask", ["none", "causal", "padding"])
def test_attention_with_dropout_is_attention_on_average(mask):
    torch.manual_seed(0)
    query, key, value = torch.randn(3, 2, 2, 5, 4).unbind(0)
    hidden = (torch.arange(5) < torch.tensor([[3], [0]]))[:, None, None] if mask == "padding" else None
    how = {"mask": hidden, "is_causal": mask == "causal"}
    expected = attention.attend(query, key, value, **how)
    many = [each.expand(4000, *each.shape) for each in (query, key, value)]
    found = attention.attend(*many, dropout=0.2, **how)
    spread = found.std(0).clamp(min=1e-6)
    assert found.std(0).max() > 0.1 and bool(((found.mean(0) - expected).abs() < 4.5 * spread / 4000**0.5).all())

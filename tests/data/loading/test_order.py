import torch

from runner.data.loading.order import generator, mixed, permutation


def test_an_order_depends_on_the_seed_and_the_epoch_alone():
    torch.manual_seed(1)
    first = permutation(50, seed=3, epoch=2)
    torch.manual_seed(2)
    assert torch.equal(first, permutation(50, seed=3, epoch=2))
    assert sorted(first.tolist()) == list(range(50))


def test_the_order_is_this_one_on_every_machine():
    """A change here changes every existing run."""
    assert permutation(8, seed=0, epoch=0).tolist() == [4, 7, 2, 0, 1, 3, 5, 6]
    assert permutation(8, seed=0, epoch=1).tolist() == [6, 1, 5, 4, 2, 0, 3, 7]


def test_neighbouring_seeds_and_epochs_share_no_order():
    orders = {tuple(permutation(30, seed=seed, epoch=epoch).tolist()) for seed in range(20) for epoch in range(20)}
    assert len(orders) == 400


def test_all_bits_of_a_seed_count():
    """torch's CPU generator uses only the low 32 bits of its seed."""
    plain = [torch.randperm(30, generator=torch.Generator().manual_seed(seed)) for seed in (1, 2**32 + 1)]
    assert torch.equal(*plain)
    assert not torch.equal(permutation(30, seed=1, epoch=0), permutation(30, seed=2**32 + 1, epoch=0))


def test_mixed_numbers_are_seeds():
    found = [mixed(a, b) for a in (0, 1, 2**63 - 1) for b in (0, 1, 2, 10**9)]
    assert len({seed % 2**32 for seed in found}) == len(found)
    assert all(0 <= seed < 2**63 for seed in found)
    assert mixed(1, 2) != mixed(2, 1)
    assert generator(1, 2).initial_seed() == mixed(1, 2)

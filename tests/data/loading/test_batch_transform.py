import torch
from torch import nn

from runner.data.loading.batch_transform import TransformedBatches
from runner.data.loading.resident import Resident
from runner.data.loading.streamed import Streamed

CPU = torch.device("cpu")


class Shifted(nn.Module):
    """Adds its buffer and, in training, the row's draws."""

    num_draws = 2

    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.tensor([10.0]))

    def forward(self, batch, draws):
        x, y = batch
        return x + self.shift + (draws.sum(1, keepdim=True) if self.training else 0), y


def rows(count=53):
    return torch.zeros(count, 1), torch.arange(count)


def finished(kind=Resident, *, is_training=True, seed=0):
    batches = kind(rows(), batch_size=10, device=CPU, seed=seed, shuffle=is_training)
    return TransformedBatches(batches, Shifted(), device=CPU, seed=seed, is_training=is_training)


def all_of(batches, number, **kwargs):
    return [(x.tolist(), y.tolist()) for x, y in batches.epoch(number, **kwargs)]


def test_what_is_random_goes_by_the_seed_and_the_epoch_whoever_reads_the_rows():
    assert all_of(finished(), 3) == all_of(finished(), 3) == all_of(finished(Streamed), 3)
    # by position, not by row: the order of rows differs in each epoch anyway
    drawn = [x for x, _ in all_of(finished(), 3)]
    assert drawn != [x for x, _ in all_of(finished(), 4)]
    assert drawn != [x for x, _ in all_of(finished(seed=1), 3)]
    values = torch.cat([x for x, _ in finished().epoch(0)])
    assert len(values.unique()) == 53
    assert ((values > 10) & (values < 12)).all()


def test_an_epoch_that_begins_in_its_middle_has_the_same_draws():
    for first in range(7):
        assert all_of(finished(), 2, first_batch=first) == all_of(finished(), 2)[first:]


def test_nothing_is_random_outside_of_training():
    assert {value for x, _ in finished(is_training=False).epoch(0) for value in x[:, 0].tolist()} == {10.0}


def test_the_module_counts_to_what_lies_on_the_device():
    plain = Resident(rows(), batch_size=10, device=CPU, seed=0, shuffle=True)
    assert finished().device_bytes == plain.device_bytes + 4
    assert finished().num_batches == 6

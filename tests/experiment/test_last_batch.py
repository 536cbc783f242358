"""A last batch with one row for a process, where batch normalization needs two, is an error before the run."""

import pytest
import torch
from torch import nn

from runner import cli
from runner.data.loading.batches import Shard
from runner.errors import RunnerError
from runner.experiment.build_data import check_last_batch

CPU = torch.device("cpu")


class Rows:
    def __init__(self, num_rows, batch_size):
        self.num_rows, self.batch_size = num_rows, batch_size

    def epoch(self, number):
        yield (torch.rand(min(self.batch_size, self.num_rows), 3),)


def task(model, batch):
    return {"loss": model(batch[0]).mean()}


def told(num_rows, batch_size, num_ranks, model):
    """Return the suggested setting, or ""."""
    try:
        check_last_batch(model, task, Rows(num_rows, batch_size), CPU, num_ranks)
    except RunnerError as error:
        return error.problems[0].help
    return ""


@pytest.mark.parametrize("num_ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [2, 7, 8, 12])
def test_unsuitable_batch_size_suggests_another(num_ranks, batch_size):
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4))
    for num_rows in range(2 * num_ranks, 40):

        def crashes(size, num_rows=num_rows):
            shares = [Shard(rank, num_ranks).of_batches(num_rows, size, first_batch=0) for rank in range(num_ranks)]
            return any(rows.stop - rows.start < 2 for share in shares for rows in share)

        fix = told(num_rows, batch_size, num_ranks, model)
        assert bool(fix) == crashes(batch_size), num_rows
        if fix:
            assert not crashes(int(fix.removeprefix("use `train.batch_size=").removesuffix("`"))), num_rows


def test_too_few_rows_suggest_more_data():
    model = nn.BatchNorm1d(3)
    assert told(5, 4, 4, model) == "use data with more rows"
    assert told(1, 4, 1, model) == "use data with more rows"


def test_last_batch_hint_omits_suitable_layers():
    assert told(17, 16, 2, nn.LayerNorm(3)) == ""
    # it synchronizes with the other processes
    assert told(17, 16, 2, nn.Sequential(nn.BatchNorm1d(3), nn.SyncBatchNorm(3))) == ""
    assert told(17, 16, 2, nn.Sequential(nn.Unflatten(1, (1, 3)), nn.BatchNorm1d(1))) == ""  # three positions per row


def test_unsuitable_batch_of_processes_is_refused(own_folder, capfd):
    words = ["model=resnet", "model.width=4", "device=cpu", "train.num_epochs=1", "tracking.enabled=false"]
    rows = ["data.limit=103", "train.batch_size=16", "train.num_processes=2"]
    assert cli.main([*words, *rows, "task.plots=false"]) == 2
    err = capfd.readouterr().err
    assert "2 share 3 rows in the last batch" in err and "help: use `train.batch_size=15`" in err


def test_exiting_code_is_reported_by_run():
    class Ends(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm = nn.BatchNorm1d(3)

        def forward(self, inputs):
            raise SystemExit

    assert told(5, 2, 1, Ends()) == ""

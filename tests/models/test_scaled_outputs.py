import torch

from runner.models.scaled_outputs import Scaled


def test_outputs_come_in_the_targets_units():
    module = Scaled([100.0, 0.0], [50.0, 2.0])
    assert module(torch.tensor([[0.0, 1.0], [-2.0, 0.5]])).tolist() == [[100.0, 2.0], [0.0, 1.0]]
    assert set(module.state_dict()) == {"means", "spreads"}

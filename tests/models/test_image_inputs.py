import pytest
import torch
from simulated import run_simulated
from torch.utils._python_dispatch import TorchDispatchMode

from runner.models.image_inputs import ImageInputs


def test_bytes_are_normalised_by_channel():
    module = ImageInputs([0.5, 0.0], [0.25, 1.0])
    images = torch.tensor([[[[0, 255]], [[51, 255]]]], dtype=torch.uint8)
    assert module(images).flatten().tolist() == pytest.approx([-2.0, 2.0, 0.2, 1.0])
    assert module(images.long()).tolist() == module(images).tolist()


def test_floats_are_in_0_to_1_already():
    module = ImageInputs([0.5], [0.25])
    images = torch.randint(256, (2, 1, 3, 3), dtype=torch.uint8)
    torch.testing.assert_close(module(images.float() / 255), module(images))


def test_a_channel_that_is_the_same_everywhere_stays_finite():
    assert ImageInputs([0.2], [0.0])(torch.full((1, 1, 1, 1), 51, dtype=torch.uint8)).item() == pytest.approx(0)


def test_its_numbers_travel_with_the_weights_and_are_not_learned():
    module = ImageInputs([0.5], [0.25])
    assert list(module.parameters()) == []
    other = ImageInputs([0.0], [1.0])
    other.load_state_dict(module.state_dict())
    assert other.mean.item() == 0.5
    assert other.std.item() == 0.25


def test_half_precision_models_get_their_own_type():
    assert ImageInputs([0.5], [0.25]).bfloat16()(torch.zeros(1, 1, 2, 2, dtype=torch.uint8)).dtype == torch.bfloat16


class Seen(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.names = [*getattr(self, "names", []), func.overloadpacket.__name__]
        return func(*args, **(kwargs or {}))


def kernels_and_values(device):
    """Return the kernels and values after loading another module's numbers."""
    module = ImageInputs([0.0, 0.0], [1.0, 1.0])
    module.load_state_dict(ImageInputs([0.5, 0.1], [0.25, 0.3]).state_dict())
    module, images = module.to(device), torch.arange(16, dtype=torch.uint8).mul(16).view(2, 2, 2, 2).to(device)
    values = []
    for given in (images, images / 255):
        with Seen() as seen:
            found = module(given)
        values.append(found.cpu().flatten().tolist())
    return seen.names, values


def test_a_gpu_takes_one_kernel_for_scaling_and_shifting():
    names, values = run_simulated("cuda:0", kernels_and_values)
    assert [name for name in names if name.strip("_") in ("addcmul", "add", "sub", "mul", "div")] == ["addcmul"]
    expected = kernels_and_values("cpu")[1]
    assert values[0] == pytest.approx(expected[0], abs=1e-5) and values[1] == pytest.approx(expected[1], abs=1e-5)

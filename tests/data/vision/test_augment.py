"""The effect of each augmentation on a tiny image, by hand; only `draws` decides it."""

import math

import numpy as np
import pytest
import torch
from refused import problems_of
from scipy.stats import beta

from runner.data.array_files import arrays
from runner.data.builtin.scikit import digits
from runner.data.loading.batches import BatchTransform
from runner.data.loading.loaders import Resident
from runner.data.source import Source
from runner.data.vision.augment import NAMES, Augment, augmented
from runner.inspection.host_reads import HostReads

EVERYTHING = {
    "flip": True,
    "vertical_flip": 0.3,
    "crop": 2,
    "rotate": 20,
    "scale": 0.2,
    "brightness": 0.3,
    "contrast": 0.3,
    "saturation": 0.3,
    "cutout": 3,
    "mixup": 0.4,
}
#: 2 rows of 3
TINY = torch.tensor([[[[1, 2, 3], [4, 5, 6]]]], dtype=torch.uint8)


def source(images, targets, num_classes=3):
    facts = {"input_shape": list(images.shape[1:]), "num_classes": num_classes}
    return Source("tiny", (images, targets), facts)


def finish(images=TINY, *, num_classes=3, **strengths):
    module = augmented(source(images, torch.zeros(len(images)), num_classes), strengths).finish
    assert module is not None
    return module


def changed(draws, images=TINY, **strengths):
    module = finish(images, **strengths)
    batch = module((images, torch.zeros(len(images), dtype=torch.int64)), torch.tensor([draws] * len(images)))
    return batch[0]


@pytest.mark.parametrize(
    ("strengths", "draws", "expected"),
    [
        ({"flip": True}, [0.49], [[3, 2, 1], [6, 5, 4]]),
        ({"flip": True}, [0.5], [[1, 2, 3], [4, 5, 6]]),
        ({"flip": 1}, [0.999], [[3, 2, 1], [6, 5, 4]]),
        ({"vertical_flip": 0.3}, [0.2], [[4, 5, 6], [1, 2, 3]]),
        ({"crop": 1}, [0.5, 0.5], [[1, 2, 3], [4, 5, 6]]),
        ({"crop": 1}, [0.0, 0.5], [[0, 0, 0], [1, 2, 3]]),
        ({"crop": 1}, [0.99, 0.0], [[0, 4, 5], [0, 0, 0]]),
        ({"crop": 2}, [0.5, 0.99], [[3, 0, 0], [6, 0, 0]]),
        ({"cutout": 1}, [0.5, 0.5], [[1, 2, 3], [4, 0, 6]]),
        ({"cutout": 2}, [0.0, 0.99], [[1, 0, 0], [4, 5, 6]]),
        ({"rotate": 180}, [0.0], [[6, 5, 4], [3, 2, 1]]),
        ({"rotate": 180}, [0.5], [[1, 2, 3], [4, 5, 6]]),
        ({"brightness": 0.5}, [0.0], [[0, 1, 2], [2, 2, 3]]),  # halves are rounded to even
        ({"contrast": 0.5}, [0.0], [[2, 3, 3], [4, 4, 5]]),
        ({"flip": True, "cutout": 1}, [0.0, 0.0, 0.0], [[0, 2, 1], [6, 5, 4]]),
    ],
    ids=str,
)
def test_a_tiny_image(strengths, draws, expected):
    image = changed(draws, **strengths)
    assert image.dtype == torch.uint8
    assert image.tolist() == [[expected]]


def test_bytes_stay_in_their_range():
    image = changed([0.99], torch.full((1, 1, 2, 2), 250, dtype=torch.uint8), brightness=0.5)
    assert image.unique().tolist() == [255]


def test_a_quarter_turn_and_a_zoom():
    square = torch.arange(9.0).reshape(1, 1, 3, 3)
    torch.testing.assert_close(changed([0.75], square, rotate=180), square.rot90(1, (3, 2)), atol=1e-5, rtol=0)
    wide = torch.zeros(1, 1, 3, 5)
    wide[..., 1, 3] = 1  # the pixel to the right of the middle moves below it, as pixels are square
    assert changed([0.75], wide, rotate=180)[0, 0].round().nonzero().tolist() == [[2, 2]]
    spot = torch.zeros(1, 1, 5, 5)
    spot[..., 2, 2] = 1
    assert changed([0.99], spot, scale=0.5).sum() > 1.5  # larger
    assert changed([0.01], spot, scale=0.5).sum() < 0.5 + 0.51  # smaller, with the same brightness


def test_saturation_keeps_gray():
    grey = torch.full((1, 3, 2, 2), 0.4)
    torch.testing.assert_close(changed([0.0], grey, saturation=0.5), grey)
    red = torch.tensor([1.0, 0, 0]).reshape(1, 3, 1, 1)
    expected = torch.tensor([0.6495, 0.1495, 0.1495]).reshape(1, 3, 1, 1)
    torch.testing.assert_close(changed([0.0], red, saturation=0.5), expected)


def test_mixup_shares_images_and_classes_equally():
    images = torch.tensor([0.0, 1.0, 2.0]).reshape(3, 1, 1, 1).expand(3, 1, 2, 2)
    mixed, shares = finish(images, mixup=1)((images, torch.tensor([0, 1, 2])), torch.tensor([[0.0], [0.5], [0.999]]))
    assert mixed[:, 0, 0, 0].tolist() == pytest.approx([1.0, 0.75, 2.0], abs=2e-3)
    expected = [[0.5, 0, 0.5], [0.25, 0.75, 0], [0, 0, 1]]
    torch.testing.assert_close(shares, torch.tensor(expected), atol=1e-3, rtol=0)


def test_mixup_of_a_regression_mixes_its_numbers():
    images, targets = torch.zeros(2, 1, 2, 2), torch.tensor([[0.0], [4.0]])
    module = finish(images, num_classes=None, mixup=1)
    assert module((images, targets), torch.tensor([[0.0], [0.5]]))[1].flatten().tolist() == pytest.approx(
        [2, 3], abs=1e-3
    )


@pytest.mark.parametrize("alpha", [0.1, 0.2, 1, 10])
def test_the_shares_are_those_of_beta(alpha):
    module = finish(mixup=alpha)
    draws = torch.linspace(0, 0.99, 200)
    expected = beta.ppf((1 + draws.double().numpy()) / 2, alpha, alpha)
    np.testing.assert_allclose(module._share(draws).numpy(), expected, atol=2e-3)


def test_each_row_has_its_draws():
    images = TINY.expand(2, 1, 2, 3)
    module = finish(images, flip=True)
    batch = module((images, torch.zeros(2)), torch.tensor([[0.1], [0.9]]))
    assert batch[0][:, 0, 0].tolist() == [[3, 2, 1], [1, 2, 3]]


def test_list_of_names_has_usual_strengths():
    listed = augmented(source(torch.zeros(1, 1, 8, 8), torch.zeros(1)), ["crop", {"flip": 0.25}]).finish
    assert isinstance(listed, Augment)
    assert listed.strengths == {"flip": 0.25, "crop": 4.0}
    assert list(listed.strengths) == ["flip", "crop"]
    assert listed.num_draws == 3


def test_evaluation_changes_nothing():
    images = torch.randint(256, (4, 3, 8, 8), dtype=torch.uint8)
    module = finish(images, **EVERYTHING).eval()
    batch = (images, torch.zeros(4, dtype=torch.int64))
    assert module(batch, torch.empty(4, 0)) is batch


@pytest.mark.parametrize("setting", [None, {}, [], {"flip": None}])
def test_no_augmentation_keeps_the_source(setting):
    plain = source(TINY, torch.zeros(1))
    assert augmented(plain, setting) is plain


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_same_draws_give_same_batch_everywhere(device, dtype):
    images = (torch.rand(16, 3, 8, 8) * 255).to(dtype)
    targets, draws = torch.arange(16) % 3, torch.rand(16, 12)
    module = finish(images, **EVERYTHING)
    here = module((images, targets), draws)
    there = module.to(device)((images.to(device), targets.to(device)), draws.to(device))
    assert here[0].dtype == dtype
    close = {"atol": 1.0, "rtol": 0.0} if dtype == torch.uint8 else {"atol": 1e-2, "rtol": 1e-4}
    # a half may be rounded up on one device and down on the other
    torch.testing.assert_close(there[0].cpu(), here[0], **close)
    torch.testing.assert_close(there[1].cpu(), here[1])


def loader(device, kind=Resident):
    images, targets = torch.randint(256, (50, 3, 8, 8), dtype=torch.uint8), torch.arange(50) % 3
    batches = kind((images, targets), batch_size=8, device=device, seed=3, shuffle=True)
    module = finish(images, **EVERYTHING).to(device)
    batches.transform = BatchTransform(module, device=device, seed=3, is_training=True)
    return batches


def test_epochs_differ_and_can_be_repeated(device):
    torch.manual_seed(0)
    batches = loader(device)
    first, again, second = (list(batches.epoch(number)) for number in (0, 0, 1))
    assert all(torch.equal(a[0], b[0]) and torch.equal(a[1], b[1]) for a, b in zip(first, again, strict=True))
    assert not any(torch.equal(a[0], b[0]) for a, b in zip(first, second, strict=True))
    assert all(torch.equal(a[0], b[0]) for a, b in zip(first[3:], batches.epoch(0, first_batch=3), strict=True))


def test_nothing_is_read_from_the_device(device):
    batches = loader(device)
    with HostReads(device) as watch:
        for _ in batches.epoch(0):
            pass
    found = [str(read) for read in watch.reads]
    towards = [read for read in found if "a copy from the host" in read]  # the order and the draws, once per epoch
    assert found == towards
    assert len(towards) <= (0 if device.type == "cuda" else 2)


@pytest.mark.parametrize(
    "setting",
    [
        {"flop": True},
        ["crop", "flop"],
        {"cutmix": 1},
        {"zoomed": 1},
        [["flip"]],
        {"crop": math.inf},
        {"flip": 2},
        {"crop": 1.5},
        {"crop": 9},
        {"cutout": 9},
        {"rotate": "a bit"},
        {"brightness": 1},
        {"mixup": -1},
        {"saturation": True},
        "flip",
        True,
        3,
    ],
    ids=str,
)
def test_invalid_augmentations_are_refused(setting, messages):
    messages(problems_of(digits, setting))


def test_all_bad_augmentations_are_reported():
    assert len(problems_of(digits, {"flop": 1, "mixup": -1})) == 2


def test_rows_other_than_images_are_refused(messages):
    messages(problems_of(augmented, source(torch.zeros(2, 64), torch.zeros(2)), ["flip"]))


def test_arrays_and_digits_take_it(own_folder, messages):
    np.savez(own_folder / "images.npz", x=np.zeros((6, 1, 8, 8)), y=np.arange(6) % 2)
    np.savez(own_folder / "table.npz", x=np.zeros((6, 8)), y=np.arange(6) % 2)
    for found in (arrays("images.npz", augment=["flip"]), digits(augment={"flip": 0.5})):
        assert isinstance(found.finish, Augment)
        assert found.finish.num_draws == 1
    assert digits().finish is None
    messages(problems_of(arrays, "table.npz", augment=["flip"]))


assert set(EVERYTHING) == set(NAMES)

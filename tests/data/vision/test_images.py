"""Directories of real images, written by PIL: the pixels that are read, and whole runs on them."""

import json
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refused import problems_of

import runner
from runner.config.instantiate import build
from runner.data.split import fingerprint, split
from runner.data.vision.dataset import decoded
from runner.data.vision.images import channel_statistics, images, read_images
from runner.errors import RunnerError

CLASSES = ("blue", "red")


def save(file, pixels, **settings):
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(file, **settings)


def picture(number, *, is_red, height=8, width=8):
    pixels = np.random.default_rng(number).integers(0, 90, (height, width, 3), dtype=np.uint8)
    pixels[..., 0 if is_red else 2] += 150
    return pixels


def make(folder, count=6, **sizes):
    """Write `count` images of each class, one of them in a subdirectory of its class."""
    for index, name in enumerate(CLASSES):
        for number in range(count):
            inner = folder / name / "more" if number == 0 else folder / name
            pixels = picture(100 * index + number, is_red=name == "red", **sizes)
            save(inner / f"{number:03}.png", pixels)
    return folder


def refused(*args, **settings):
    (problem,) = problems_of(images, *args, **settings)
    return problem


def test_a_folder_for_each_class(tmp_path):
    source = images(str(make(tmp_path / "set")))
    pixels, labels = source.rows
    assert (pixels.shape, pixels.dtype) == ((12, 3, 8, 8), torch.uint8)
    assert labels.tolist() == source.labels.tolist() == [0] * 6 + [1] * 6
    assert source.classes == CLASSES
    assert source.facts == {"input_shape": [3, 8, 8], "in_features": 192, "num_classes": 2, "out_features": 2}
    assert source.given == {}
    assert "12 images, decoded once (auto: " in source.origin
    expected = torch.from_numpy(picture(100 + 1, is_red=True)).permute(2, 0, 1)
    assert torch.equal(pixels[6], expected)  # 001.png: files in subdirectories come after the files of the class


@pytest.mark.parametrize("val", ["val", "validation"])
@pytest.mark.parametrize("decode", ["once", "workers"])
def test_ready_splits(tmp_path, val, decode):
    make(tmp_path / "train")
    make(tmp_path / val, count=1)
    make(tmp_path / "test", count=2)
    source = images(str(tmp_path), decode=decode)
    splits = split(source, val_fraction=0.5, test_fraction=0.5, limit=None, seed=0)
    assert splits.sizes == {"train": 12, "val": 2, "test": 4}
    rows = splits.val.__getitems__([0, 1]) if decode == "workers" else splits.val
    assert rows[1].tolist() == [0, 1]


@pytest.mark.parametrize(
    "names", [["train", "val", "unlabeled"], ["train", "val", "validation"], ["train", "test", "old", "older"]], ids=str
)
def test_directories_next_to_splits_are_refused(tmp_path, names, messages):
    for name in names:
        make(tmp_path / name)
    messages(refused(str(tmp_path)))


def test_a_class_that_is_called_train(tmp_path):
    for name in ("bus", "train"):
        save(tmp_path / name / "1.png", picture(0, is_red=True))
    assert images(str(tmp_path)).classes == ("bus", "train")


def test_other_and_hidden_files_are_skipped(tmp_path):
    make(tmp_path)
    (tmp_path / "readme.md").write_text("words")
    (tmp_path / "red" / "notes.txt").write_text("words")
    (tmp_path / "red" / "._1.png").write_bytes(b"")
    (tmp_path / "red" / "loop").symlink_to(tmp_path / "red")
    save(tmp_path / ".trash" / "1.png", picture(0, is_red=True))
    assert len(images(str(tmp_path)).rows[0]) == 12


def test_images_of_workers_equal_those_in_memory(tmp_path):
    make(tmp_path)
    here, there = images(str(tmp_path), decode="once"), images(str(tmp_path), decode="workers")
    assert len(there.rows) == 12
    rows = [there.rows[index] for index in range(12)]
    for found in (there.rows.__getitems__(list(range(12))), there.rows.collate_fn(rows)):
        assert torch.equal(found[0], here.rows[0])
        assert torch.equal(torch.as_tensor(found[1]), here.rows[1])
    assert there.facts == here.facts
    assert torch.equal(pickle.loads(pickle.dumps(there.rows)).__getitems__([3])[0], here.rows[0][3:4])
    assert there.rows.collate_fn(found := there.rows.__getitems__([3, 1])) is found


def test_fingerprint_changes_with_an_image(tmp_path):
    make(tmp_path)
    for decode in ("once", "workers"):
        before = fingerprint(images(str(tmp_path), decode=decode))
        assert fingerprint(images(str(tmp_path), decode=decode)) == before
        save(tmp_path / "red" / "001.png", np.zeros((8, 8, 3), np.uint8))
        assert fingerprint(images(str(tmp_path), decode=decode)) != before
        save(tmp_path / "red" / "001.png", picture(101, is_red=True))


@pytest.mark.parametrize("given", [False, True])
def test_fingerprint_is_the_same_for_workers(tmp_path, given):
    """decode=auto depends on the free memory at that moment."""
    for name in ("train", "test") if given else ("",):
        make(tmp_path / name)
    prints = [fingerprint(images(str(tmp_path), decode=decode)) for decode in ("once", "workers")]
    assert prints[0] == prints[1] != fingerprint(images(str(tmp_path), size=4))


@pytest.mark.parametrize(("size", "shape"), [(4, (4, 4)), ([4, 6], (4, 6)), ([16, 4], (16, 4))])
def test_images_are_scaled_and_center_cropped(tmp_path, size, shape):
    wide = np.zeros((8, 24, 3), np.uint8)
    wide[:, 8:16] = 200  # the middle third
    save(tmp_path / "a" / "wide.png", wide)
    save(tmp_path / "b" / "other.png", np.full((5, 9, 3), 7, np.uint8))
    pixels = images(str(tmp_path), size=size).rows[0]
    assert pixels.shape == (2, 3, *shape)
    assert pixels[0, 0, :, shape[1] // 2].unique().tolist() == [200]
    assert pixels[1].unique().tolist() == [7]


def test_large_jpeg_keeps_its_content_when_scaled(tmp_path):
    ramp = np.linspace(0, 255, 512).astype(np.uint8)[None, :, None].repeat(512, 0).repeat(3, 2)
    save(tmp_path / "ramp.jpg", ramp, quality=95)
    small = decoded(tmp_path / "ramp.jpg", mode="gray", size=(16, 16))[0, 8].float()
    np.testing.assert_allclose(small.numpy(), np.linspace(8, 247, 16), atol=4)
    stripes = (np.arange(512) // 8 % 2 * 255).astype(np.uint8)[None, :, None].repeat(512, 0).repeat(3, 2)
    save(tmp_path / "stripes.jpg", stripes, quality=95)
    fine = decoded(tmp_path / "stripes.jpg", mode="gray", size=(256, 256))[0, 8].float()
    assert (fine[1::8].mean(), fine[5::8].mean()) == (pytest.approx(0, abs=9), pytest.approx(255, abs=9))


@pytest.mark.parametrize("decode", ["once", "workers"])
def test_different_sizes_are_refused_with_a_file(tmp_path, decode, messages):
    make(tmp_path)
    save(tmp_path / "red" / "odd.png", np.zeros((5, 9, 3), np.uint8))
    messages(refused(str(tmp_path), decode=decode))


def test_all_broken_images_are_reported(tmp_path, messages):
    make(tmp_path)
    whole = (tmp_path / "red" / "002.png").read_bytes()
    (tmp_path / "red" / "002.png").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "blue" / "001.png").write_text("no image")
    (tmp_path / "blue" / "002.png").write_bytes(b"")
    problem = messages(refused(str(tmp_path), size=4))
    assert refused(str(tmp_path)).message == problem.message
    messages(refused(str(tmp_path), decode="workers"))  # only their headers are read
    for number in (1, 2):
        save(tmp_path / "blue" / f"00{number}.png", picture(number, is_red=False))
    streamed = images(str(tmp_path), decode="workers")
    messages(problems_of(channel_statistics, streamed.rows))


def test_first_of_many_broken_images_are_named(tmp_path, messages):
    for number in range(50):
        (tmp_path / "a").mkdir(exist_ok=True)
        (tmp_path / "a" / f"{number:02}.png").write_bytes(b"")
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "50.png").write_bytes(b"")
    messages(refused(str(tmp_path)))


def test_kinds_of_images(tmp_path):
    ramp = np.arange(0, 65536, 1024, dtype=np.uint16).reshape(8, 8)
    save(tmp_path / "16.png", ramp)
    np.testing.assert_allclose(decoded(tmp_path / "16.png", mode="gray", size=None)[0], ramp / 257, atol=0.51)
    clear = np.zeros((2, 2, 4), np.uint8)
    clear[0] = 255, 0, 0, 255  # the upper row is red, and the rows below are transparent
    save(tmp_path / "alpha.png", clear)
    assert decoded(tmp_path / "alpha.png", mode="rgb", size=None)[:, :, 0].tolist() == [[255, 255], [0, 255], [0, 255]]
    palette = Image.new("P", (2, 1))
    palette.putpalette([10, 20, 30, 200, 100, 50])
    palette.putpixel((1, 0), 1)
    palette.save(tmp_path / "palette.png")
    assert decoded(tmp_path / "palette.png", mode="rgb", size=None)[:, 0, :].T.tolist() == [
        [10, 20, 30],
        [200, 100, 50],
    ]
    palette.save(tmp_path / "hole.png", transparency=1)
    assert decoded(tmp_path / "hole.png", mode="rgb", size=None)[:, 0, :].T.tolist() == [[10, 20, 30], [255] * 3]
    Image.new("CMYK", (2, 2), (0, 255, 255, 0)).save(tmp_path / "cmyk.tif")
    assert decoded(tmp_path / "cmyk.tif", mode="rgb", size=None)[:, 0, 0].tolist() == [255, 0, 0]
    Image.new("1", (2, 2), 1).save(tmp_path / "1.png")
    assert decoded(tmp_path / "1.png", mode="rgb", size=None).unique().tolist() == [255]
    Image.new("F", (2, 2), 0.5).save(tmp_path / "floats.tif")
    with pytest.raises(ValueError, match="floats"):
        decoded(tmp_path / "floats.tif", mode="rgb", size=None)


def test_exif_orientation_is_applied(tmp_path):
    pixels = np.zeros((8, 16, 3), np.uint8)
    pixels[:, :8] = 255  # rotated: the left half becomes the upper one by tag 6
    tags = Image.Exif()
    tags[0x0112] = 6
    save(tmp_path / "a" / "lying.jpg", pixels, exif=tags, quality=100)
    save(tmp_path / "b" / "standing.jpg", pixels.swapaxes(0, 1), quality=100)
    source = images(str(tmp_path), mode="gray")
    assert source.rows[0].shape == (2, 1, 16, 8)
    assert source.rows[0][0, 0, 0, 0] > 250
    assert source.rows[0][0, 0, 15].max() < 5


def test_layers_normalize_by_the_training_split(tmp_path):
    make(tmp_path / "train")
    save(tmp_path / "test" / "red" / "1.png", np.full((8, 8, 3), 255, np.uint8))
    for decode in ("once", "workers"):
        source = images(str(tmp_path), decode=decode)
        rows = split(source, val_fraction=0.25, test_fraction=0, limit=None, seed=0).train
        found = rows[0] if decode == "once" else rows.__getitems__(list(range(len(rows))))[0]
        values = found.double() / 255
        before = source.around(rows).before
        assert before["mean"] == pytest.approx(values.mean((0, 2, 3)).tolist())
        assert before["std"] == pytest.approx(values.std((0, 2, 3), correction=0).tolist())
        normalised = build(before)(found)
        assert normalised.mean((0, 2, 3)).abs().max() < 1e-5
        assert json.loads(json.dumps(before)) == before


def test_reader_reads_images_in_the_same_form(tmp_path, messages):
    source = images(str(make(tmp_path / "set")), size=[4, 6], mode="gray")
    reader = build(json.loads(json.dumps(source.reader)))
    other = tmp_path / "other"

    def read(path):
        return torch.cat(list(reader(path)))

    for number in range(3):
        save(other / f"{number}.png", picture(number, is_red=True, height=20, width=30))
    whole = read(other)
    assert (whole.shape, whole.dtype) == ((3, 1, 4, 6), torch.uint8)
    assert torch.equal(read(str(other / "1.png")), whole[1:2])
    assert torch.equal(read([other / "2.png", str(other / "0.png")]), whole[[2, 0]])
    (other / "list.txt").write_text("2.png\n\n0.png\n")
    assert torch.equal(read(other / "list.txt"), whole[[2, 0]])
    (tmp_path / "empty").mkdir()
    for wrong in (other / "9.png", tmp_path / "set" / "blue" / "none", tmp_path / "empty"):
        messages(problems_of(read, wrong))


def test_predictions_read_images_in_blocks(tmp_path, monkeypatch):
    from runner.data.vision import images

    monkeypatch.setattr(images, "BLOCK", 5)
    make(tmp_path)
    blocks = list(read_images(tmp_path, size=[8, 8], mode="rgb"))
    assert [len(block) for block in blocks] == [5, 5, 2]


def test_like_reads_other_images_the_same(tmp_path, messages):
    first = images(str(make(tmp_path / "first")), size=4, mode="gray")
    save(tmp_path / "second" / "red" / "1.png", picture(1, is_red=True, height=30, width=20))
    again = images(str(tmp_path / "second"), like=first.reader)
    assert again.rows[0].shape == (1, 1, 4, 4)
    assert again.classes == CLASSES
    assert again.rows[1].tolist() == [1]
    save(tmp_path / "second" / "green" / "1.png", picture(1, is_red=True))
    messages(refused(str(tmp_path / "second"), like=first.reader))


def test_workers_decode_if_memory_is_short(tmp_path, monkeypatch):
    import psutil

    make(tmp_path)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: type("Memory", (), {"available": 4000}))
    source = images(str(tmp_path))
    assert isinstance(source.rows, torch.utils.data.Dataset)
    assert "decoded by workers (auto: " in source.origin


@pytest.mark.parametrize(
    "settings",
    [
        {"mode": "grey"},
        {"size": 0},
        {"size": [4, 4, 3]},
        {"size": "big"},
        {"decode": "never"},
        {"augment": {"flop": 1}},
    ],
    ids=str,
)
def test_invalid_settings_are_refused(tmp_path, settings, messages):
    messages(refused(str(make(tmp_path)), **settings))


def test_invalid_directories_are_refused(tmp_path, messages):
    make(tmp_path / "flowers")
    assert messages(refused(str(tmp_path / "flower"))).suggestions == (f"data.path={tmp_path}/flowers",)
    messages(refused(str(tmp_path / "flowers" / "red")))
    (tmp_path / "flowers" / "white").mkdir()
    messages(refused(str(tmp_path / "flowers")))
    make(tmp_path / "split" / "train")
    save(tmp_path / "split" / "val" / "grey" / "1.png", picture(1, is_red=True))
    messages(refused(str(tmp_path / "split")))
    (tmp_path / "nothing").mkdir()
    messages(refused(str(tmp_path / "nothing")))


def test_one_class_is_refused(tmp_path, messages):
    root, animals = tmp_path / "set", tmp_path / "set" / "animals"
    make(animals)
    assert messages(refused(str(root))).suggestions == (f"data.path={animals}",)
    assert images(str(animals)).classes == CLASSES
    root.rename(tmp_path / "train")
    make(tmp_path / "val" / "animals")
    assert messages(refused(str(tmp_path))).suggestions == ()
    save(tmp_path / "single" / "red" / "1.png", picture(1, is_red=True))
    messages(refused(str(tmp_path / "single")))
    # like in the evaluation of an earlier run
    assert len(images(str(tmp_path / "single"), like={"classes": CLASSES}).labels) == 1


def run(folder, *words):
    fixed = ["data=images", "data.path=set", "model=cnn", "model.channels=[4,8]", "train.batch_size=8"]
    fixed += ["train.num_epochs=2", "tracking.enabled=false", "data.augment={flip:true,crop:1}"]
    return runner.run([*fixed, "task.plots=false", *words], folder=folder)


def test_runs_with_workers_are_the_same(own_folder):
    make(own_folder / "set", count=15)
    resident = run("resident", "data.decode=once")
    streamed = run("streamed", "data.decode=workers", "data.num_workers=1")
    assert (resident["status"], streamed["status"]) == ("finished", "finished")
    assert resident["metrics"]["val/loss"] == streamed["metrics"]["val/loss"]
    assert resident["metrics"]["test/accuracy"] == streamed["metrics"]["test/accuracy"]
    card = json.loads(Path("resident/model.json").read_text())
    assert card["model"]["before"]["_target_"] == "runner.models.ImageInputs"
    assert card["classes"] == list(CLASSES)
    assert card["reader"]["size"] == [8, 8]


def test_broken_image_of_worker_is_named(own_folder):
    make(own_folder / "set", count=30)
    file = own_folder / "set" / "red" / "017.png"
    file.write_bytes(file.read_bytes()[:-60])
    with pytest.raises(RunnerError, match=r"red/017\.png"):
        run("run", "data.decode=workers", "data.num_workers=1")

"""Sets of the `datasets` library from generated files: nothing is downloaded."""

import builtins
import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from refused import problems_of

from runner.config.instantiate import build
from runner.config.packages import install
from runner.data.language.text import TextRows
from runner.data.split import fingerprint, split
from runner.errors import RunnerError

datasets = pytest.importorskip("datasets")
from runner.data.hub.datasets import huggingface  # noqa: E402


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory, monkeypatch):
    """Set what HF_HOME would set, if it were set before the library is imported."""
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)


def write_csv(file, count=40, header="width,height,label"):
    rows = [f"{index % 7},{index / 4},{'small' if index % 2 else 'tall'}" for index in range(count)]
    file.write_text("\n".join([header, *rows]) + "\n")
    return str(file)


def write_images(folder, count=6, side=8):
    for index, name in enumerate(("dark", "light")):
        for number in range(count):
            file = folder / name / f"{number}.png"
            file.parent.mkdir(parents=True, exist_ok=True)
            pixels = np.random.default_rng(number).integers(0, 90, (side, side, 3), dtype=np.uint8) + 150 * index
            Image.fromarray(pixels.astype(np.uint8)).save(file)
    return str(folder)


def refused(*args, **settings):
    (problem,) = problems_of(huggingface, *args, **settings)
    return problem


def read_again(source, path):
    """Return the inputs of a file, as a prediction reads them."""
    return torch.cat(list(build(json.loads(json.dumps(source.reader)))(path)))


def batch(rows, indices):
    return rows.__getitems__(list(indices))


def test_a_csv_of_numbers_and_classes(tmp_path):
    source = huggingface("csv", data_files=write_csv(tmp_path / "a.csv"))
    inputs, targets = source.rows
    assert (inputs.shape, inputs.dtype, targets.dtype) == ((40, 2), torch.float32, torch.int64)
    assert inputs[9].tolist() == [2, 2.25]
    assert source.classes == ("small", "tall")
    assert targets.tolist() == source.labels.tolist() == [1, 0] * 20
    assert source.facts == {"input_shape": [2], "in_features": 2, "num_classes": 2, "out_features": 2}
    assert source.around is None


@pytest.mark.parametrize("ending", ["csv", "tsv", "jsonl", "parquet"])
def test_file_is_read_by_its_ending(tmp_path, ending):
    import pandas as pd

    frame = pd.DataFrame({"x": [1.5, 2.5, 3.5], "target": [0.5, 1.0, 2.0], "id": [7, 8, 9]})
    file = tmp_path / f"a.{ending}"
    if ending == "parquet":
        frame.to_parquet(file)
    elif ending == "jsonl":
        frame.to_json(file, orient="records", lines=True)
    else:
        frame.to_csv(file, sep="\t" if ending == "tsv" else ",", index=False)
    source = huggingface(str(file))
    assert source.rows[0].tolist() == [[1.5], [2.5], [3.5]]
    assert source.rows[1].tolist() == [[0.5], [1.0], [2.0]]
    assert source.classes == ()
    assert source.facts["num_classes"] is None


def test_mapped_rows_equal_those_in_memory(tmp_path):
    file = write_csv(tmp_path / "a.csv")
    here, there = huggingface(file, decode="once"), huggingface(file, decode="workers")
    assert "decoded by workers" in there.origin
    found = batch(there.rows, [5, 3, 39])
    assert torch.equal(found[0], here.rows[0][[5, 3, 39]])
    assert torch.equal(found[1], here.rows[1][[5, 3, 39]])
    assert there.rows.collate_fn(found) is found
    assert torch.equal(there.rows.collate_fn([there.rows[4], there.rows[6]])[0], here.rows[0][[4, 6]])
    assert there.facts == here.facts
    before = fingerprint(there)
    assert fingerprint(huggingface(file, decode="workers")) == before
    write_csv(tmp_path / "a.csv", header="width,height,label", count=38)
    assert fingerprint(huggingface(file, decode="workers")) != before


@pytest.mark.parametrize("form", ["numbers", "images", "texts", "a text to go on with"])
def test_fingerprint_is_the_same_for_mapped_rows(tmp_path, form):
    """decode=auto depends on the free memory at that moment."""
    how = {"path": "csv", "data_files": write_csv(tmp_path / "a.csv")}
    if form == "images":
        how = {"path": write_images(tmp_path / "set")}
    elif form == "texts":
        (tmp_path / "t.csv").write_text("text,label\ngood bad,1\nwhat good,0\n")
        how = {"path": str(tmp_path / "t.csv"), "context_length": 5}
    elif form == "a text to go on with":
        (tmp_path / "t.txt").write_text("one line\nanother\n")
        how = {"path": str(tmp_path / "t.txt"), "context_length": 5}
    prints = {fingerprint(huggingface(**how, decode=decode)) for decode in ("once", "workers")}
    assert len(prints) == 1
    other = {"size": 4} if form == "images" else {"inputs": "width"} if form == "numbers" else {"context_length": 4}
    assert prints != {fingerprint(huggingface(**{**how, **other}))}


def test_rows_can_be_pickled(tmp_path):
    (tmp_path / "a.csv").write_text("text,label\ngood bad,1\nwhat good,0\n")
    tokenizer = write_tokenizer(tmp_path / "tokenizer.json")
    rows = huggingface(str(tmp_path / "a.csv"), tokenizer=tokenizer, context_length=3, decode="workers").rows
    again = pickle.loads(pickle.dumps(rows))
    assert all(map(torch.equal, batch(again, [1, 0]), batch(rows, [1, 0])))


def test_splits_are_found_or_named(tmp_path, messages):
    files = {name: write_csv(tmp_path / f"{name}.csv", count) for name, count in [("train", 20), ("validation", 6), ("test", 4), ("other", 3)]}  # fmt: skip
    found = huggingface("csv", data_files=files)
    assert split(found, val_fraction=0.5, test_fraction=0.5, limit=None, seed=0).sizes == {
        "train": 20,
        "val": 6,
        "test": 4,
    }
    named = huggingface("csv", data_files=files, split={"train": "other", "test": "train"})
    assert len(named.rows[0]) == 3
    assert {name: len(rows[0]) for name, rows in named.given.items()} == {"test": 20}
    lone = huggingface("csv", data_files={"other": files["other"]})
    assert (len(lone.rows[0]), lone.given) == (3, {})
    messages(refused("csv", data_files=files, split={"train": "tain"}))
    messages(refused("csv", data_files=files, split={"dev": "train"}))
    messages(refused("csv", data_files={"a": files["train"], "b": files["test"]}))


def test_classes_are_those_of_the_training_split(tmp_path, messages):
    train, test = write_csv(tmp_path / "train.csv"), tmp_path / "test.csv"
    test.write_text("width,height,label\n1,2,tall\n3,4,tall\n")
    assert huggingface("csv", data_files={"train": train, "test": str(test)}).given["test"][1].tolist() == [1, 1]
    test.write_text("width,height,label\n1,2,huge\n")
    messages(refused("csv", data_files={"train": train, "test": str(test)}))


def test_lists_of_numbers_are_taken_flat(tmp_path, messages):
    rows = [{"pixels": [[i, 1], [2, 3]], "y": i % 3} for i in range(6)]
    (tmp_path / "a.jsonl").write_text("\n".join(map(json.dumps, rows)))
    source = huggingface(str(tmp_path / "a.jsonl"))
    assert source.rows[0].shape == (6, 4)
    assert source.rows[0][5].tolist() == [5, 1, 2, 3]
    assert source.facts["num_classes"] == 3
    rows[2]["pixels"] = [[1], [2]]
    (tmp_path / "b.jsonl").write_text("\n".join(map(json.dumps, rows)))
    messages(refused(str(tmp_path / "b.jsonl")))


def test_dates_as_target_are_refused(tmp_path, messages):
    file = tmp_path / "a.csv"
    file.write_text("x,when\n" + "".join(f"{day},2026-11-{day}\n" for day in range(10, 30)))
    messages(refused(str(file), target="when"))
    assert huggingface(str(file), target="when", kind="classification").facts["num_classes"] == 20


def test_missing_value_is_refused_with_its_row(tmp_path, messages):
    (tmp_path / "a.csv").write_text("x,y,label\n1,2,a\n3,,b\n5,6,a\n")
    messages(refused(str(tmp_path / "a.csv")))
    (tmp_path / "b.csv").write_text("x,label\n1,a\n2,\n")
    messages(refused(str(tmp_path / "b.csv")))


@pytest.mark.parametrize("decode", ["once", "workers"])
def test_a_folder_of_images(tmp_path, decode):
    source = huggingface(write_images(tmp_path / "set"), decode=decode)
    rows = source.rows if decode == "once" else batch(source.rows, range(12))
    assert (rows[0].shape, rows[0].dtype) == ((12, 3, 8, 8), torch.uint8)
    assert source.classes == ("dark", "light")
    assert rows[1].tolist() == [0] * 6 + [1] * 6
    expected = torch.from_numpy(np.array(Image.open(tmp_path / "set" / "light" / "2.png"))).permute(2, 0, 1)
    assert torch.equal(rows[0][8], expected)
    before = source.around(source.rows).before
    assert before["mean"] == pytest.approx((rows[0].double() / 255).mean((0, 2, 3)).tolist())


def test_images_in_a_table_are_decoded(tmp_path):
    table = datasets.Dataset.from_dict(
        {"img": [Image.new("RGB", (6, 4), (9 * i, 0, 0)) for i in range(4)], "label": [0, 1, 0, 1]},
        features=datasets.Features({"img": datasets.Image(), "label": datasets.ClassLabel(names=["no", "yes"])}),
    )
    table.save_to_disk(tmp_path / "saved")
    source = huggingface(str(tmp_path / "saved"))
    assert source.rows[0].shape == (4, 3, 4, 6)
    assert source.rows[0][3, 0].unique().tolist() == [27]
    assert source.classes == ("no", "yes")
    small = huggingface(str(tmp_path / "saved"), size=2, mode="gray", decode="workers")
    assert batch(small.rows, [1])[0].shape == (1, 1, 2, 2)


def test_images_of_many_sizes_and_broken_ones(tmp_path, messages):
    folder = write_images(tmp_path / "set")
    Image.new("RGB", (5, 9)).save(tmp_path / "set" / "dark" / "9.png")
    messages(refused(folder))
    (tmp_path / "set" / "dark" / "9.png").write_bytes(b"no image")
    messages(refused(folder, size=8))


def test_texts_and_classes_become_tokens(tmp_path):
    (tmp_path / "a.csv").write_text("idx,sentence,label\n0,good,1\n1,bä,0\n2,very good,1\n")
    for decode in ("once", "workers"):
        source = huggingface(str(tmp_path / "a.csv"), context_length=6, decode=decode)
        rows = source.rows if decode == "once" else batch(source.rows, range(3))
        assert rows[0].tolist() == [[*b"good", 256, 256], [*"bä".encode(), 256, 256, 256], [*b"very g"]]
        assert rows[1].tolist() == [1, 0, 1]
        assert source.facts == {"input_shape": [6], "num_classes": 2, "out_features": 2, "vocab_size": 257, "context_length": 6, "padding_token": 256}  # fmt: skip
        told = "1 of 3 texts that were read have more than 6 tokens (up to 9), and are cut there"
        assert source.notes == (f"{told}; a larger data.context_length takes more of them",)
    assert huggingface(str(tmp_path / "a.csv"), context_length=9).notes == ()


def test_several_texts_are_joined(tmp_path):
    (tmp_path / "a.csv").write_text("one,two,label\nab,c,1\nd,e,0\n")
    source = huggingface(str(tmp_path / "a.csv"), inputs=["one", "two"], context_length=4)
    assert source.rows[0].tolist() == [[*b"ab\nc"], [*b"d\ne", 256]]


@pytest.mark.parametrize("decode", ["once", "workers"])
def test_text_without_target_predicts_next_tokens(tmp_path, decode):
    (tmp_path / "a.txt").write_text("hello\n\nhi\n")
    source = huggingface("text", data_files=str(tmp_path / "a.txt"), context_length=4, decode=decode)
    inputs, targets = source.rows if decode == "once" else batch(source.rows, range(2))
    assert inputs.tolist() == [[*b"hell"], [*b"hi", 256, 256]]
    assert targets.tolist() == [[*b"ello"], [*b"i", -100, -100, -100]]
    assert source.facts == {"input_shape": [4], "num_classes": None, "out_features": 257, "vocab_size": 257, "context_length": 4, "padding_token": 256}  # fmt: skip
    assert source.labels is None


def write_tokenizer(file, **special):
    from tokenizers import Tokenizer, models, pre_tokenizers

    words = {"[UNK]": 0, "good": 1, "bad": 2, "${x}": 3, **special}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(file))
    return str(file)


def test_a_tokenizer_of_a_file(tmp_path, messages):
    (tmp_path / "a.csv").write_text("text,label\ngood bad,1\nwhat good ${x} bad,0\n")
    settings = {"tokenizer": write_tokenizer(tmp_path / "tokenizer.json"), "context_length": 3}
    source = huggingface(str(tmp_path / "a.csv"), **settings)
    assert source.rows[0].tolist() == [[1, 2, 4], [0, 1, 3]]
    assert source.facts["vocab_size"] == 5
    write_tokenizer(tmp_path / "tokenizer.json", **{"[PAD]": 4, "more": 5})
    padded = huggingface(str(tmp_path / "a.csv"), **settings)
    assert padded.rows[0].tolist() == [[1, 2, 4], [0, 1, 3]]
    assert padded.facts["vocab_size"] == 6
    Path(settings["tokenizer"]).unlink()  # the reader contains everything it needs from the tokenizer
    assert "${" not in json.dumps(source.reader)
    assert torch.equal(read_again(source, str(tmp_path / "a.csv")), source.rows[0])
    messages(refused(str(tmp_path / "a.csv"), **settings))
    messages(problems_of(TextRows, "{}", 4))


def test_a_reader_reads_the_same_columns(tmp_path, messages):
    source = huggingface(write_csv(tmp_path / "a.csv"))
    (tmp_path / "b.csv").write_text("more,height,width\nx,0.5,3\ny,1.5,4\n")
    assert read_again(source, str(tmp_path / "b.csv")).tolist() == [[3, 0.5], [4, 1.5]]
    (tmp_path / "c.csv").write_text("heigt,width\n0.5,3\n")
    messages(problems_of(read_again, source, str(tmp_path / "c.csv")))
    (tmp_path / "t.txt").write_text("hello\nhi\n")
    texts = huggingface(str(tmp_path / "t.txt"), context_length=4)
    assert read_again(texts, str(tmp_path / "t.txt")).tolist() == [[*b"hell"], [*b"hi", 256, 256]]
    images = huggingface(write_images(tmp_path / "set"), size=4)
    assert read_again(images, tmp_path / "set" / "dark").shape == (6, 3, 4, 4)


def test_cut_texts_of_prediction_give_a_warning(tmp_path, caplog):
    (tmp_path / "t.txt").write_text("hello\nhi\n")
    read_again(huggingface(str(tmp_path / "t.txt"), context_length=4), str(tmp_path / "t.txt"))
    assert [each.getMessage() for each in caplog.records if each.name == "runner"] == [
        "1 of 2 texts that were read have more than 4 tokens (up to 5), and are cut there, as in the training"
    ]


def test_predictions_are_read_in_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.data.hub.datasets.BLOCK", 16)
    source = huggingface(write_csv(tmp_path / "a.csv"))
    blocks = list(build(source.reader)(str(tmp_path / "a.csv")))
    assert [len(block) for block in blocks] == [16, 16, 8]
    assert torch.equal(torch.cat(blocks), source.rows[0])


def test_like_reads_another_file_the_same(tmp_path):
    source = huggingface(write_csv(tmp_path / "a.csv"), inputs="height")
    (tmp_path / "b.csv").write_text("label,height,width\ntall,0.5,3\n")
    again = huggingface(str(tmp_path / "b.csv"), like=source.reader)
    assert again.rows[0].tolist() == [[0.5]]
    assert again.rows[1].tolist() == [1]
    assert again.classes == ("small", "tall")
    images = huggingface(write_images(tmp_path / "set"), size=4)
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["light", "dark"])})
    more = {"image": [Image.new("RGB", (9, 9))] * 3, "label": [0, 1, 1]}
    datasets.Dataset.from_dict(more, features).save_to_disk(tmp_path / "more")
    again = huggingface(str(tmp_path / "more"), like=images.reader, size=9)
    assert again.classes == ("dark", "light")
    assert again.rows[1].tolist() == [1, 0, 0]
    assert again.rows[0].shape[2:] == (4, 4)


def test_split_with_hidden_classes_is_left_out(tmp_path, messages):
    features = datasets.Features({"x": datasets.Value("float32"), "label": datasets.ClassLabel(names=["a", "b"])})
    make = datasets.Dataset.from_dict
    parts = {"train": make({"x": [1, 2], "label": [0, 1]}, features), "test": make({"x": [1], "label": [-1]}, features)}
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "saved")
    assert huggingface(str(tmp_path / "saved")).given == {}
    parts["train"] = make({"x": [1, 2], "label": [0, -1]}, features)
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "other")
    messages(refused(str(tmp_path / "other")))


def test_augmentation_is_for_images(tmp_path, messages):
    source = huggingface(write_images(tmp_path / "set"), augment=["flip"])
    assert source.finish is not None
    messages(refused(write_csv(tmp_path / "a.csv"), augment=["flip"]))


@pytest.mark.parametrize(
    ("table", "settings"),
    [
        ("x,label\n1,a\n", {"target": "lable"}),
        ("x,label\n1,a\n", {"inputs": "z"}),
        ("x,z\n1,2\n", {}),
        ("x,s,label\n1,a,2\n", {}),
        ("x,s,label\n1,a,2\n", {"inputs": ["x", "s"]}),
        ("x,label\n1,a\n", {"kind": "classes"}),
        ("s,label\nab,1\n", {"context_length": 0}),
        ("s,label\nab,1\n", {"tokenizer": "byte"}),
        ("x,label\n1,a\n", {"decode": "x"}),
    ], ids=str,
)  # fmt: skip
def test_invalid_columns_and_settings_are_refused(tmp_path, table, settings, messages):
    (tmp_path / "a.csv").write_text(table)
    messages(refused(str(tmp_path / "a.csv"), **settings))


def test_unused_settings_are_refused(tmp_path, messages):
    file = write_csv(tmp_path / "a.csv")
    (tmp_path / "saved").mkdir()
    (tmp_path / "saved" / "state.json").write_text("{}")
    for path in (file, str(tmp_path / "saved")):
        messages(problems_of(huggingface, path, "small", data_files="b.csv"))


def test_missing_sets_are_refused(own_folder, messages):
    write_csv(own_folder / "table.csv")
    (own_folder / "a.xyz").write_text("")
    for name in ("owner/no_such_set", "tabel.csv", "./nowhere", "csv", "a.xyz"):
        messages(refused(name))
    messages(refused("csv", data_files="nothing.csv"))
    messages(refused("csv", "small", data_files="table.csv"))
    (own_folder / "pandas").mkdir()
    for name in ("pandas", "sql"):
        messages(refused(name, data_files="table.csv"))
    write_csv(own_folder / "pandas" / "a.csv")
    assert len(huggingface("./pandas").rows[0]) == 40, "the directory, not the library's reader of pickles"
    (own_folder / "broken.csv").write_text("a,label\n1,2\n3,4,5\n")
    assert "Expected 2 fields in line 3" in refused("broken.csv").message
    (own_folder / "broken.parquet").write_text("words")
    assert "arquet" in refused("broken.parquet").message


def test_missing_package_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def without(name, *args, **kwargs):
        if name in ("datasets", "tokenizers"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    file = write_tokenizer(tmp_path / "tokenizer.json")
    monkeypatch.setattr(builtins, "__import__", without)
    assert refused("a/b").help == f"run `{install('huggingface')}`"
    with pytest.raises(RunnerError, match=re.escape(install("text"))):
        TextRows(Path(file).read_text(), 4)


def test_progress_bars_of_library_are_restored(tmp_path, capfd):
    huggingface(write_csv(tmp_path / "a.csv"))
    assert not datasets.are_progress_bars_disabled()
    assert "Generating" not in capfd.readouterr().err
    datasets.disable_progress_bars()
    try:
        huggingface(str(tmp_path / "a.csv"))
        assert datasets.are_progress_bars_disabled()
    finally:
        datasets.enable_progress_bars()

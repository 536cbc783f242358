import base64
import json

import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.language.text import text
from runner.data.language.tokens import tokens, write_tokens
from runner.data.loading.batches import BatchTransform
from runner.data.loading.loaders import Loading, load
from runner.data.source import as_source
from runner.data.split import fingerprint, split

CPU = torch.device("cpu")
ALL_OF_ASCII = "".join(map(chr, range(32, 127)))


def write(folder, content, name="a.txt"):
    file = folder / name
    file.write_bytes(content if isinstance(content, bytes) else content.encode())
    return str(file)


def cut(source, **settings):
    return split(source, **{"val_fraction": 0.2, "test_fraction": 0.2, "limit": None, "seed": 0, **settings})


def batches(source, *, name="train", residency="auto", epoch=1, first_batch=0, seed=0, num_workers=0):
    """Return all batches of a split in an epoch, as a run gets them."""
    rows = getattr(cut(source), name)
    loader, _ = load(
        rows, Loading(residency, num_workers=num_workers), batch_size=4, device=CPU, seed=seed, shuffle=name == "train"
    )  # fmt: skip
    loader.transform = BatchTransform(source.finish, device=CPU, seed=seed, is_training=name == "train")
    try:
        return list(loader.epoch(epoch, first_batch=first_batch))
    finally:
        loader.close()


@pytest.fixture
def counting(tmp_path):
    """Write a text whose characters give their position: the n-th is the code point 1000 + n."""
    return write(tmp_path, "".join(chr(1000 + number) for number in range(1001)))


def test_targets_are_the_next_tokens(counting):
    source = as_source(text(counting, context_length=10), name="text")
    assert source.rows.tolist() == list(range(0, 1000, 10))
    for name in ("train", "val", "test"):
        for inputs, targets in batches(source, name=name):
            assert inputs.dtype == targets.dtype == torch.int64
            assert inputs.shape == targets.shape == (len(inputs), 10)
            assert torch.equal(inputs + 1, targets)
            assert torch.equal(inputs, inputs[:, :1] + torch.arange(10))


def test_training_windows_leave_out_other_splits(counting):
    source = text(counting, context_length=10)
    seen = torch.cat([targets.flatten() for epoch in range(20) for _, targets in batches(source, epoch=epoch)])
    assert seen.max() == 600, "of 1,001 tokens the first 600 and what follows"
    for name, expected in {"val": range(601, 801), "test": range(801, 1001)}.items():
        told = torch.cat([targets.flatten() for _, targets in batches(source, name=name)])
        assert told.tolist() == list(expected), "each once, in order"


def test_random_windows_begin_anywhere(counting):
    starts = {"random": set(), "sequential": set()}
    for windows, found in starts.items():
        source = text(counting, context_length=10, windows=windows)
        for epoch in range(40):
            found |= {int(start) for inputs, _ in batches(source, epoch=epoch) for start in inputs[:, 0]}
    assert starts["sequential"] == set(range(0, 600, 10))
    assert starts["random"] <= set(range(591)) and len(starts["random"]) > 550


@pytest.mark.parametrize("windows", ["random", "sequential"])
def test_resident_streamed_and_mapped_windows_are_equal(tmp_path, windows):
    words = "".join(chr(97 + number * number % 23) for number in range(700))
    write_tokens([words], tmp_path / "a.bin", "characters")
    source = text(write(tmp_path, words), context_length=9, windows=windows)
    mapped = tokens(str(tmp_path / "a.bin"), context_length=9, windows=windows)
    for name in ("train", "val"):
        ways = [
            batches(source, name=name, residency="device"),
            batches(source, name=name, residency="stream"),
            batches(mapped, name=name),
            batches(mapped, name=name, num_workers=1),
        ]
        for other in ways[1:]:
            assert all(
                torch.equal(a, b)
                for one, two in zip(ways[0], other, strict=True)
                for a, b in zip(one, two, strict=True)
            )
    assert source.facts == mapped.facts


def test_resumed_epoch_continues_with_the_same_windows(counting):
    source = text(counting, context_length=10)
    whole, rest = batches(source, epoch=3), batches(source, epoch=3, first_batch=5)
    assert len(rest) == len(whole) - 5
    assert all(torch.equal(a[0], b[0]) for a, b in zip(whole[5:], rest, strict=True))
    others = [batches(source, epoch=4), batches(source, epoch=3, seed=1)]
    assert not any(torch.equal(whole[0][0], other[0][0]) for other in others)


def test_text_is_on_the_device_once(counting):
    from copy import deepcopy

    finish = text(counting, context_length=10).finish
    train, val = deepcopy(finish).train(), deepcopy(finish).eval()
    assert train.tokens is val.tokens
    assert (train.training, val.training) == (True, False)
    train.to("meta")
    assert val.tokens.is_meta, "moved for all of them"


def test_facts_and_names(tmp_path):
    source = text(write(tmp_path, "ab" * 50), context_length=8)
    assert source.facts == {
        "input_shape": [8], "num_classes": None, "out_features": 2,
        "vocab_size": 2, "context_length": 8, "bytes_per_token": 1.0,
    }  # fmt: skip
    assert source.origin.endswith("a.txt: 100 characters")
    assert text(write(tmp_path, "äö" * 50), context_length=8).facts["bytes_per_token"] == 2
    assert text(write(tmp_path, "äö" * 50), context_length=8, tokens="bytes").facts["vocab_size"] == 256


def test_another_text_has_another_fingerprint(tmp_path):
    prints = [fingerprint(text(write(tmp_path, words * 20), context_length=8)) for words in ("abcd", "abdc", "abcd")]
    assert prints[0] == prints[2] != prints[1]


def test_several_files_are_read_end_to_end(tmp_path):
    write(tmp_path, "bbbb" * 5, "2.txt"), write(tmp_path, "aaaa" * 5, "1.txt")
    for path in (str(tmp_path / "*.txt"), [str(tmp_path / "1.txt"), str(tmp_path / "2.txt")]):
        assert text(path, context_length=4).finish.tokens.tolist() == [0] * 20 + [1] * 20
    assert (
        text([str(tmp_path / "2.txt"), str(tmp_path / "*.txt")], context_length=4).finish.tokens.tolist()
        == [1] * 20 + [0] * 20
    )


@pytest.fixture
def tokenizer(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    pieces = {"[U]": 0, "${": 1, "}": 2, "the": 3, "cat": 4, "sat": 5, "x": 6}
    made = Tokenizer(models.WordLevel(pieces, unk_token="[U]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.enable_truncation(3)
    made.save(str(tmp_path / "tokenizer.json"))
    return str(tmp_path / "tokenizer.json")


def test_a_tokenizer_of_the_library(tmp_path, tokenizer):
    source = text(write(tmp_path, "the cat sat ${ x } " * 20), tokens=tokenizer, context_length=4)
    assert source.facts["vocab_size"] == 7
    assert source.finish.tokens[:7].tolist() == [3, 4, 5, 1, 6, 2, 3]
    assert source.facts["bytes_per_token"] == pytest.approx(19 / 6)
    reader = build(json.loads(json.dumps(source.reader)))
    assert reader.encode("cat ${ dog") == [4, 1, 0]
    assert reader.decode([3, 4, 1]) == "the cat ${"


@pytest.mark.parametrize("kind", ["characters", "bytes"])
def test_a_reader_goes_there_and_back(tmp_path, kind):
    words = ALL_OF_ASCII + "${x}\n\tgrün 🐈"
    source = text(write(tmp_path, words * 3), tokens=kind, context_length=8)
    reader = build(json.loads(json.dumps(source.reader)))
    assert reader.decode(reader.encode(words)) == words
    assert reader.vocab_size == source.facts["vocab_size"]


def test_token_beyond_the_vocabulary_names_vocab_size(tmp_path):
    reader = build(text(write(tmp_path, "abcdefgh" * 9), tokens="characters", context_length=4).reader)
    problem = problems_of(reader.decode, [3, 126])[0]
    assert problem.source == "token 126" and "vocab_size" in problem.help and str(reader.vocab_size) in problem.help


def test_a_reader_reads_a_file_whole(tmp_path):
    reader = build(text(write(tmp_path, "abcdefghij" * 9), context_length=4).reader)
    assert reader(write(tmp_path, "abcdefghij", "new.txt")).tolist() == [[0, 1, 2, 3], [4, 5, 6, 7], [6, 7, 8, 9]]
    assert reader(write(tmp_path, "cab", "new.txt")).tolist() == [[2, 0, 1]]
    assert reader(write(tmp_path, "abcdefgh", "new.txt")).shape == (2, 4)


def test_like_keeps_the_vocabulary(tmp_path):
    first = text(write(tmp_path, "abcd" * 30), context_length=8)
    second = text(write(tmp_path, "dcdc" * 30), like=first.reader)
    assert second.facts == first.facts
    assert second.finish.tokens[:2].tolist() == [3, 2]
    assert second.reader == first.reader


def problem_of(make, *words, **settings):
    return problems_of(make, *words, **settings)[0]


def test_invalid_texts_are_refused(tmp_path, own_folder, messages):
    write(own_folder, "abc" * 30, "novel.txt")
    write(own_folder, b"line\nbad \xff", "latin.txt")
    write(own_folder, "{}", "empty.json")
    for settings in (
        {"path": "novle.txt"},
        {"path": "no/novel.txt"},
        {"path": str(own_folder)},
        {"path": "latin.txt"},
        {"path": "novel.txt", "tokens": "caracters"},
        {"path": "novel.txt", "tokens": "empty.json"},
        {"path": "novel.txt", "windows": "randon"},
        {"path": "novel.txt", "context_length": 90},
        {"path": "novel.txt", "context_length": 0},
    ):
        messages(problem_of(text, **settings))


def test_unknown_character_is_refused(tmp_path, messages):
    reader = build(text(write(tmp_path, "ab\n" * 30), context_length=8).reader)
    for content in ("ab\nbax", ""):
        messages(problem_of(reader, write(tmp_path, content, "new.txt")))
    messages(problem_of(reader.encode, "q"))


def test_bytes_know_every_text(tmp_path):
    reader = build(text(write(tmp_path, "ab\n" * 30), context_length=8, tokens="bytes").reader)
    content = base64.b64decode("/////w==")
    assert reader(write(tmp_path, content, "new.txt")).tolist() == [[255] * 4]

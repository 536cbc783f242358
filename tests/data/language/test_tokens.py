import json
import os
import pickle
import subprocess
import sys
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pytest
import torch
from refused import problems_before
from waiting import LONGEST

from runner.config.instantiate import build
from runner.data.language.tokens import TokenNote, tokens, write_tokens
from runner.data.split import fingerprint, split
from runner.errors import RunnerError
from runner.version import PACKAGES

COUNTED = np.arange(1001, dtype=np.uint16)


def bin_file(folder, numbers=COUNTED, name="a.bin"):
    Path(folder / name).write_bytes(numbers.tobytes())
    return str(folder / name)


def problem_of(make, *words, **settings):
    if early := problems_before(make, *words, **settings):
        return early[0]
    with pytest.raises(RunnerError) as caught:
        made = make(*words, **settings)
        list(made)
    return caught.value.problems[0]


def test_row_has_room_for_random_windows(tmp_path):
    rows = tokens(bin_file(tmp_path), context_length=10).rows
    assert len(rows) == 100
    chunks, most = rows.__getitems__([5, 1, 0])
    assert chunks.dtype == torch.int32
    assert chunks[0].tolist() == list(range(40, 61))
    assert chunks[1].tolist() == list(range(21))
    assert chunks[2].tolist() == [0] * 10 + list(range(11)), "before the first token there is none"
    assert most.tolist() == [9, 9, 0]
    assert rows.collate_fn((chunks, most))[0] is chunks
    assert torch.equal(rows.collate_fn([rows[5], rows[1], rows[0]])[0], chunks)
    rows = tokens(bin_file(tmp_path), context_length=10, windows="sequential").rows
    assert rows.__getitems__([99])[0].tolist() == [list(range(990, 1001))]


@pytest.mark.parametrize("dtype", ["uint8", "uint16", "uint32"])
def test_bin_files_of_each_type_and_npy(tmp_path, dtype):
    numbers = (np.arange(300) * 7 % 251).astype(dtype)
    np.save(tmp_path / "a.npy", numbers.astype(np.int64))
    told = dtype if dtype != "uint16" else None
    for source in (
        tokens(bin_file(tmp_path, numbers), dtype=told, context_length=4),
        tokens(str(tmp_path / "a.npy"), context_length=4),
    ):
        assert source.rows.__getitems__([20])[0][0].tolist() == numbers[76:85].tolist()
        assert source.facts["vocab_size"] == 251
        assert source.facts["context_length"] == 4


def test_greatest_token_gives_the_vocabulary_size(tmp_path, monkeypatch):
    monkeypatch.setattr("runner.data.language.tokens.TOKENS_A_PASS", 64)
    numbers = COUNTED.copy()
    numbers[700] = 5000
    path = bin_file(tmp_path, numbers)
    assert tokens(path, context_length=8).facts["vocab_size"] == 5001
    assert tokens(path, context_length=8, vocab_size=6000).facts["vocab_size"] == 6000
    assert not Path(path + ".json").exists()


@pytest.mark.parametrize("content", ["[]", '{"weights": 3}', "no JSON"])
def test_foreign_json_file_stays(tmp_path, content):
    path = bin_file(tmp_path, COUNTED)
    Path(path + ".json").write_text(content)
    assert tokens(path, context_length=8).facts["vocab_size"] == len(COUNTED)
    assert Path(path + ".json").read_text() == content


def test_texts_are_written_and_read_again(tmp_path):
    path = tmp_path / "a.bin"
    assert write_tokens(["grün ", "und blau"] * 30, path, "characters") == 390
    source = tokens(str(path), context_length=13, windows="sequential")
    assert source.facts["vocab_size"] == len(set("grün und blau"))
    assert source.facts["bytes_per_token"] == pytest.approx(14 / 13)
    reader = build(json.loads(json.dumps(source.reader)))
    assert reader.decode(source.rows[3][0].tolist()) == "grün und blaug"
    assert reader.decode(reader.encode("blau")) == "blau"
    assert write_tokens(iter(["ü"] * 30), path) == 60
    assert tokens(str(path), context_length=4).facts["vocab_size"] == 256, "of the vocabulary, not of the text"


def test_wrong_dtype_keeps_the_vocabulary(tmp_path):
    path = tmp_path / "a.bin"
    write_tokens(["grün ", "und blau"] * 30, path, "characters")
    before = Path(f"{path}.json").read_text()
    tokens(str(path), dtype="uint8", context_length=13)
    assert Path(f"{path}.json").read_text() == before


def test_copy_is_read_as_it_was_written(tmp_path):
    path, numbers = tmp_path / "a.bin", [*range(9), 70_000]
    path.write_bytes(np.array(numbers, "<u4").tobytes())
    state, node = path.stat(), {"tokens": "characters", "entries": "abc"}
    note = TokenNote(state.st_size, state.st_mtime_ns, "uint32", 80_000, 9, node, 1.5)
    Path(f"{path}.json").write_text(json.dumps(asdict(note)))
    assert tokens(str(path), context_length=4).facts["vocab_size"] == 80_001, "no pass over the file"
    os.utime(path, ns=(5, 5))
    source = tokens(str(path), context_length=4, windows="sequential")
    assert source.rows[0][0].tolist() == [0, 1, 2, 3, 4]
    assert (source.facts["vocab_size"], source.facts["bytes_per_token"]) == (70_001, 1.5)


def test_note_of_another_file_is_refused(tmp_path, messages):
    path = tmp_path / "a.bin"
    write_tokens(["grün ", "und blau"] * 30, path)
    before = Path(f"{path}.json").read_text()
    path.write_bytes(np.arange(300, dtype="<u4").tobytes())
    messages(problem_of(tokens, str(path), context_length=4))
    assert tokens(str(path), dtype="uint32", context_length=4).facts["vocab_size"] == 300
    assert Path(f"{path}.json").read_text() == before


def test_written_type_fits_the_vocabulary(tmp_path):
    from tokenizers import Tokenizer, models, pre_tokenizers

    made = Tokenizer(models.WordLevel({"a": 0, "b": 70_000, "[U]": 1}, unk_token="[U]"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    made.save(str(tmp_path / "tokenizer.json"))
    write_tokens(["a b c "] * 10, tmp_path / "a.bin", str(tmp_path / "tokenizer.json"))
    assert (tmp_path / "a.bin").stat().st_size == 30 * 4
    source = tokens(str(tmp_path / "a.bin"), context_length=5, windows="sequential")
    assert source.rows[0][0].tolist() == [0, 70_000, 1] * 2
    assert source.facts["vocab_size"] == 70_001
    other = tokens(
        bin_file(tmp_path, COUNTED[:50], "b.bin"), context_length=5, tokenizer=str(tmp_path / "tokenizer.json")
    )
    assert build(other.reader).encode("b a") == [70_000, 0]


def test_reader_reads_token_files_in_blocks(tmp_path, monkeypatch, messages):
    from runner.data.language import tokens as room

    monkeypatch.setattr(room, "TOKENS_A_BLOCK", 40)
    reader = build(tokens(bin_file(tmp_path), context_length=10, tokenizer="bytes", vocab_size=1001).reader)
    blocks = list(reader(bin_file(tmp_path, COUNTED[:95], "b.bin")))
    assert [len(block) for block in blocks] == [4, 4, 2]
    assert torch.cat(blocks)[:, 0].tolist() == [0, 10, 20, 30, 40, 50, 60, 70, 80, 85]
    assert [block.tolist() for block in reader(bin_file(tmp_path, COUNTED[:3], "b.bin"))] == [[[0, 1, 2]]]
    (tmp_path / "b.txt").write_text("A")
    assert reader(str(tmp_path / "b.txt")).tolist() == [[65]]
    bare = build(tokens(bin_file(tmp_path), context_length=10).reader)
    assert bare.decode([3, 4]) == "3 4"
    messages([problem_of(bare, str(tmp_path / "b.txt")), problem_of(bare.encode, "A")])


def test_like_keeps_vocabulary_and_context_length(tmp_path, messages):
    first = tokens(bin_file(tmp_path), context_length=10)
    second = tokens(bin_file(tmp_path, COUNTED[:500], "b.bin"), context_length=77, like=first.reader)
    assert second.facts == first.facts
    assert second.reader == first.reader
    messages(problem_of(tokens, bin_file(tmp_path), like={**first.reader, "vocab_size": 300}))


def test_split_of_large_file_is_a_range(tmp_path):
    splits = split(
        tokens(bin_file(tmp_path), context_length=10), val_fraction=0.2, test_fraction=0.1, limit=None, seed=3
    )
    assert [splits.train.indices, splits.val.indices, splits.test.indices] == [range(70), range(70, 90), range(90, 100)]


def test_fingerprints(tmp_path):
    first = fingerprint(tokens(bin_file(tmp_path), context_length=10))
    assert fingerprint(tokens(bin_file(tmp_path), context_length=10)) == first
    assert fingerprint(tokens(bin_file(tmp_path, COUNTED[::-1]), context_length=10)) != first
    assert fingerprint(tokens(bin_file(tmp_path), context_length=11)) != first


def test_pickled_rows_map_the_file_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    bin_file(tmp_path, np.zeros(100_000, np.uint16))
    rows = tokens("a.bin", context_length=10).rows
    sent = pickle.dumps(rows)
    assert len(sent) < 1000
    monkeypatch.chdir("/")
    assert torch.equal(pickle.loads(sent)[4][0], rows[4][0])


def test_invalid_token_files_are_refused(tmp_path, own_folder, messages):
    bin_file(own_folder)
    (own_folder / "odd.bin").write_bytes(b"abc")
    (own_folder / "none.bin").write_bytes(b"")
    (own_folder / "a.txt").write_text("text")
    (own_folder / "broken.npy").write_bytes(b"\x93NUMPYx")
    np.save("table.npy", np.zeros((3, 3), np.int64))
    np.save("floats.npy", np.zeros(300))
    np.save("below.npy", np.array([3, 4, -2, 5] * 9))
    bin_file(own_folder, np.array([3_000_000_000], np.uint32), "big.bin")
    for settings in (
        {"path": "b.bin"},
        {"path": "a.txt"},
        {"path": "odd.bin"},
        {"path": "none.bin"},
        {"path": "a.bin", "dtype": "int7"},
        {"path": "a.bin", "vocab_size": 300},
        {"path": "big.bin", "dtype": "uint32"},
        {"path": "broken.npy"},
        {"path": "table.npy"},
        {"path": "floats.npy"},
        {"path": "below.npy"},
        {"path": "a.bin"},
        {"path": "a.bin", "tokenizer": "characters"},
        {"path": "a.bin", "tokenizer": "byte"},
    ):
        messages(problem_of(tokens, **settings))
    messages([problem_of(write_tokens, ["a"], "a.npy"), problem_of(write_tokens, [""], "e.bin")])


#: trains on a file of 512 MiB with at most 256 MiB of private memory. Pages of a mapped file do not count (the kernel can
#: reclaim them at any time); data that is read into memory does
TRAINING = """
import resource, sys
import torch, mlflow, runner
from runner.data.builtin.generated import synthetic

def private_bytes():
    lines = open("/proc/self/status").read().splitlines()
    return {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmData", "RssAnon"))}

torch.zeros(8, 8) @ torch.zeros(8, 8)
before = private_bytes()
limit = before["VmData"] + 256 * 2**20
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
try:
    torch.ones(2**27)
    print("no limit here")
except RuntimeError:
    print("limited")
summary = runner.run([
    "data=tokens", "data.path=big.bin", "data.context_length=1024", "data.num_workers=0", "model=gpt", "model.width=16",
    "model.depth=1", "model.num_heads=2", "task=language", "data.val_fraction=0.00001", "data.test_fraction=0.00001",
    "train.num_steps=2", "train.batch_size=4", "device=cpu", "tracking.enabled=false",
], folder="run")
print(summary["status"], summary["num_steps"], private_bytes()["RssAnon"] - before["RssAnon"])
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="the limit counts otherwise there")
def test_file_larger_than_memory_is_trained_on(own_folder):
    with (own_folder / "big.bin").open("wb") as stream:
        stream.truncate(2**29)  # zeros that take no space on the disk
        stream.seek(2**28)
        stream.write(np.arange(60, dtype=np.uint16).tobytes())
    environment = {**os.environ, "PYTHONPATH": str(PACKAGES), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", TRAINING], env=environment, capture_output=True, text=True, timeout=LONGEST, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    limited, *_, last = done.stdout.splitlines()
    status, num_steps, growth = last.split()
    assert (limited, status, num_steps) == ("limited", "finished", "2"), done.stdout[-3000:]
    assert int(growth) < 2**29 / 4, "private memory, in bytes, for a file of 512 MiB"

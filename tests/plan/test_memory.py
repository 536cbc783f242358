"""A plan's memory against the truth: what torch's own allocator counts in a real step on this CPU."""

import json
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
TRUTH = Path(__file__).parent / "truth.py"
MADE_UP = ("data=synthetic", "data.num_rows=2000")
RUNS = {
    "mlp, averaged": (*MADE_UP, "model=mlp", "model.hidden_sizes=[512,512]", "train.batch_size=512", "train.ema_decay=0.9"),
    "cnn, accumulated": ("model=cnn", "train.batch_size=64", "train.accumulate_steps=2", "train.clip_grad_norm=1"),
    "resnet": (*MADE_UP, "model=resnet", "data.shape=[3,32,32]", "train.batch_size=64"),
    "transformer": (*MADE_UP, "model=transformer", "data.shape=[32,16]", "train.batch_size=64", "train.precision=bf16"),
    "lstm": (*MADE_UP, "model=lstm", "data.shape=[64,16]", "train.batch_size=64", "optimizer=sgd"),
    "a person's own": (*MADE_UP, "model=own", "data.shape=[32,16]", "train.batch_size=256"),
}  # fmt: skip


@pytest.mark.parametrize("words", RUNS.values(), ids=RUNS)
def test_the_peak_is_within_15_percent_of_the_allocators(words, python):
    done = python("-m", "runner", "plan", "--json", "device=cpu", *words)
    planned = json.loads(done.stdout)
    assert done.returncode == 0, planned["findings"]
    real = python(TRUTH, "device=cpu", *words)
    assert real.returncode == 0, real.stderr
    assert 0.85 <= planned["memory"]["peak_bytes"] / json.loads(real.stdout) <= 1.15
    assert sum(planned["memory"]["parts"].values()) == planned["memory"]["peak_bytes"]
    assert planned["findings"] == []

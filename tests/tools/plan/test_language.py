"""Plans of language models: the text's windows, causal attention and the task, on devices that this machine lacks."""

import json

import numpy as np
import pytest

from runner import cli

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("warm_programs")]
SMALL = ("model=gpt", "model.width=32", "model.depth=2", "model.num_heads=2", "task=language", "train.batch_size=8")


def test_a_gpt_would_run_and_reads_nothing(own_folder, capsys):
    (own_folder / "a.txt").write_text("the cat sat on the mat.\n" * 60)
    words = ["device=mps", "plan.device_memory=8GiB", "model.positions=rotary", "data.context_length=16"]
    assert cli.main(["plan", "--json", "data=text", "data.path=a.txt", *words, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["would_run"], found["findings"]) == (True, [])
    kinds = found["memory"]["parts"]
    assert kinds["data set"] >= 60 * 24, "the text lies on the device"


def test_a_token_file_is_streamed(own_folder, capsys):
    np.save("a.npy", np.arange(2000) % 50)
    words = ["data=tokens", "data.path=a.npy", "data.context_length=16", "device=cuda:0", "plan.device_memory=8GiB"]
    assert cli.main(["plan", "--json", *words, *SMALL]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["would_run"] and found["residency"].startswith("streamed")

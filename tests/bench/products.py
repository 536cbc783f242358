"""What the products of linear layers by oneDNN take of a run on a CPU, compared with MKL's: `python tests/bench/products.py`."""

from __future__ import annotations

import argparse
import os
import statistics

from page import add_write, section
from recipes import summary_of
from table import header, orders

ROWS = "data=synthetic data.num_rows=20000 data.shape=[1,16,16] data.val_fraction=0.01 data.test_fraction=0.01"
RUNS = {
    "MLP 64-256-10, batch 128 (all below the least size)": "model=mlp data=digits train.num_steps=600",
    "MLP 256-512-512-10, batch 128": f"model=mlp model.hidden_sizes=[512,512] {ROWS} train.num_steps=400",
    "MLP 256-1024-1024-10, batch 128": f"model=mlp model.hidden_sizes=[1024,1024] {ROWS} train.num_steps=150",
    "ViT, `model=vit data=digits`": "model=vit data=digits train.num_steps=36",
    "transformer, `model=transformer data=mnist1d`": "model=transformer data=mnist1d train.num_steps=40",
    "GPT, `experiment=gpt_characters`": "experiment=gpt_characters train.num_steps=40",
}
BY = {"MKL": "false", "oneDNN": "true"}


def ms(words: str, by: str) -> float:
    """Return the milliseconds per step of a run."""
    found = summary_of(*words.split(), f"backends.cpu.onednn={BY[by]}", "device=cpu")
    return 1000 / float(found["steps_per_second"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=3)
    add_write(parser)
    given = parser.parse_args()
    with section("products.py", write=given.write):
        print(header(given.repeats, os.cpu_count() or 1, packages=("torch",)))
        print("| a step of, ms | MKL | oneDNN | oneDNN / MKL |")
        print("|---|---|---|---|", flush=True)
        for name, words in RUNS.items():
            turns = [{by: ms(words, by) for by in order} for order in orders(BY, given.repeats)]
            mkl, onednn = (statistics.median(turn[by] for turn in turns) for by in BY)
            print(f"| {name} | {mkl:.2f} | {onednn:.2f} | {onednn / mkl:.2f} |", flush=True)


if __name__ == "__main__":
    main()

"""What the products of linear layers by oneDNN take of a run on a CPU, compared with MKL's: `python tests/bench/products.py`."""

from __future__ import annotations

import os
import statistics

from harness import head, header, in_turns, median_ratio, parser, row, section, summary_of

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


def main() -> None:
    options = parser(__doc__, repeats=3)
    options.add_argument("--only", nargs="+", choices=RUNS, default=list(RUNS))
    given = options.parse_args()
    with section("products.py", write=given.write):
        print(header(given.repeats, os.cpu_count() or 1, packages=("torch",)))
        head("a step of, ms", "MKL", "oneDNN", "oneDNN / MKL")
        for name in given.only:
            words = [*RUNS[name].split(), "device=cpu"]

            def measure(by: str, turn: int, words: list[str] = words) -> float:
                found = summary_of([*words, f"backends.cpu.onednn={BY[by]}"], threads=None)
                return 1000 / float(found["steps_per_second"])

            mkl, onednn = in_turns(BY, given.repeats, measure).values()
            middle = (f"{statistics.median(each):.2f}" for each in (mkl, onednn))
            row(name, *middle, f"{median_ratio(onednn, mkl):.2f}")


main()

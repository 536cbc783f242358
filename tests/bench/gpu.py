"""What a GPU is to show beside the speed table, each part a table: `python tests/bench/gpu.py syncs memory gpt cifar --device cuda:0`.

syncs: operations of 1,000 steps that wait for the device, by torch's own count, beside the pulls. memory: plan's peak beside
the allocator's, of six models. gpt: a GPT of 50 million parameters, and how much of the device's arithmetic it takes.
cifar: experiment=cifar10_94, from its first step to its last. --steps makes any of them small.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import warnings
from pathlib import Path

import torch
from page import add_write, section
from table import header

ROOT = Path(__file__).resolve().parents[2]
SENTENCES = ROOT / "tests" / "support" / "language" / "sentences.txt"
QUIET = ["tracking.enabled=false", "tracking.log_model=false"]
ALONE = ["data.val_fraction=0", "data.test_fraction=0"]
MODELS = {
    "MLP 64-4096-4096-10, 4,096 rows": [
        "model=mlp",
        "model.hidden_sizes=[4096,4096]",
        "data.num_features=64",
        "train.batch_size=4096",
    ],
    "CNN, 512 images of 32x32": ["model=cnn", "data.shape=[3,32,32]", "train.batch_size=512"],
    "ResNet-18, 256 images of 32x32": ["model=resnet", "data.shape=[3,32,32]", "train.batch_size=256"],
    "ResNet-18, bf16": ["model=resnet", "data.shape=[3,32,32]", "train.batch_size=256", "train.precision=bf16"],
    "ViT, 256 images of 32x32": ["model=vit", "data.shape=[3,32,32]", "train.batch_size=256"],
    "GRU, 256 signals of 128": ["model=gru", "data.shape=[4,128]", "train.batch_size=256"],
}
WAITS = "called a synchronizing"
#: 12 width**2 weights a block: 49 million, without the embedding's
WIDTH, DEPTH, CONTEXT = 640, 10, 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"syncs": syncs, "memory": memory, "gpt": gpt, "cifar": cifar}
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--steps", type=int, help="of each run, in the place of its own number")
    parser.add_argument("--words", default="", help="more words for each run, with spaces between them")
    add_write(parser)
    given = parser.parse_args()
    for name in given.parts:
        with section(f"gpu.py {name}", write=given.write):
            print(header(1, 1) + f"\n{_name_of(given.device)}:\n")
            parts[name](given.device, given.steps, given.words.split())


def syncs(device: str, steps: int | None, words: list[str]) -> None:
    """In this process, as the count is torch's of a process."""
    from runner import run
    from runner.training.step import eager, on_device

    num_steps, is_cuda = steps or 1000, device.startswith("cuda")

    def counted(taken):  # the steps alone: what a run does before and after may wait
        def steps(self, *given, **more):
            if is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield from taken(self, *given, **more)
            finally:
                if is_cuda:
                    torch.cuda.set_sync_debug_mode("default")

        return steps

    for kind in (eager.StepByStep, on_device.OnDevice):
        kind.steps = counted(kind.steps)
    print("| steps | waits of the steps | pulls | reads that nobody asked for |\n|---|---|---|---|")
    data = ["data=synthetic", "data.num_features=64", "model=mlp", *ALONE, *QUIET, f"train.num_steps={num_steps}"]
    for name, more in {"as written": [], "CUDA graphs": ["train.cuda_graph=true"]}.items():
        if more and not is_cuda:
            continue
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with contextlib.redirect_stdout(sys.stderr):
                found = run([*data, *more, f"device={device}", "placement.guard=off", *words], folder=folder)
        waits = sum(WAITS in str(each.message) for each in said)
        reads = found["host_reads"]
        print(f"| {num_steps:,}, {name} | {waits} | {reads['pulls']} | {reads['unexpected']} |", flush=True)


def memory(device: str, steps: int | None, words: list[str]) -> None:
    print("| model | planned, MiB | allocator's peak, MiB | planned / peak |\n|---|---|---|---|")
    for name, model in MODELS.items():
        run = ["data=synthetic", "data.num_rows=8192", *model, *ALONE, f"train.num_steps={steps or 20}", *words]
        planned = _told(["plan", *run], device)["memory"]["peak_bytes"] / 2**20
        peak = _told([*run, *QUIET], device)["peak_memory_bytes"] / 2**20
        print(f"| {name} | {planned:,.0f} | {peak:,.0f} | {planned / peak:.2f} |", flush=True)


def gpt(device: str, steps: int | None, words: list[str]) -> None:
    """Six operations a weight and token, and 12 of attention for each pair of width and place (Kaplan et al. 2020, PaLM)."""
    from runner.plan.device_catalogue import MODELS as KINDS

    model = [f"data.context_length={CONTEXT}", f"model.width={WIDTH}", f"model.depth={DEPTH}", "model.num_heads=10"]
    run = ["experiment=gpt_characters", f"data.path={SENTENCES}", *model, *ALONE, *QUIET, "train.batch_size=16"]
    length = [f"train.num_steps={steps}"] if steps else ["train.num_epochs=100000", "train.max_seconds=300"]
    found = _told([*run, *length, "train.ema_decay=null", *words], device)
    matrices = 12 * WIDTH**2 * DEPTH
    flops = (6 * matrices + 12 * DEPTH * WIDTH * CONTEXT) * CONTEXT * found["samples_per_second"]
    precision = next((word.partition("=")[2] for word in words if word.startswith("train.precision=")), "fp32")
    kind = next((KINDS[name] for name in KINDS if name in _name_of(device)), None)
    most = kind.flops.get(precision) if kind else None
    print("| parameters | precision | tokens/s | TFLOP/s | of what the data sheet says |\n|---|---|---|---|---|")
    share = f"{flops / most:.1%}" if most else "no data sheet"
    tokens = found["samples_per_second"] * CONTEXT
    print(f"| {found['num_parameters']:,} | {precision} | {tokens:,.0f} | {flops / 1e12:.3g} | {share} |")


def cifar(device: str, steps: int | None, words: list[str]) -> None:
    length = [f"train.num_steps={steps}"] if steps else []
    print("| words | steps | training, s | images/s |\n|---|---|---|---|")
    found = _told(["experiment=cifar10_94", *QUIET, *length, *words], device)
    seconds = found["seconds"]["train"]
    print(
        f"| {' '.join(words) or 'none'} | {found['num_steps']:,} | {seconds:.2f} | {found['samples_per_second']:,.0f} |"
    )


def _told(words: list[str], device: str) -> dict:
    """What a command says by --json."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "runner", *words, f"device={device}", "--json"]
        path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
        environment = {**os.environ, "PYTHONPATH": path}
        done = subprocess.run(command, capture_output=True, text=True, cwd=folder, env=environment, check=False)
        if done.returncode:
            sys.exit(f"{' '.join(command)} failed:\n{done.stdout}{done.stderr}")
        return json.loads(done.stdout)


def _name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


if __name__ == "__main__":
    main()

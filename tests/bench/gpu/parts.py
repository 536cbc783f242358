"""Answer questions that need a GPU, each part by a table: `python tests/bench/gpu/parts.py graphs smoke --device cuda:0`.

--short uses tiny sizes, to try a part on a CPU. A row is printed as soon as it is known. run.py starts each part with a time limit.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import closing, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

BENCH = Path(__file__).resolve().parents[1]
ROOT = BENCH.parents[1]
sys.path[:0] = [str(BENCH), str(ROOT)]
from harness import RUNNER, environment, head, header, row  # noqa: E402
from twins import Measured, train_cifar, train_gpt  # noqa: E402

from runner.device.precision import set_float32  # noqa: E402
from runner.models.cnn import CNN  # noqa: E402
from runner.models.gpt import GPT  # noqa: E402

SENTENCES = ROOT / "tests" / "support" / "language" / "sentences.txt"
QUIET = ["tracking.enabled=false", "tracking.log_model=false", "task.plots=false"]
QUIET_TEXT = [*QUIET[:2], "task.sample_tokens=0"]
WITHOUT_SPLITS = ["data.val_fraction=0", "data.test_fraction=0"]
GRAPH, COMPILE = "train.cuda_graph=true", "train.compile=true"
ROWS = ["data=synthetic", "data.num_features=64", "model=mlp"]
MODELS = {
    "MLP 64-4096-4096-10, 4,096 rows": [*ROWS, "model.hidden_sizes=[4096,4096]", "train.batch_size=4096"],
    "CNN, 512 images of 32x32": ["model=cnn", "data.shape=[3,32,32]", "train.batch_size=512"],
    "ResNet-18, 256 images of 32x32": ["model=resnet", "data.shape=[3,32,32]", "train.batch_size=256"],
    "ResNet-18, bf16": ["model=resnet", "data.shape=[3,32,32]", "train.batch_size=256", "train.precision=bf16"],
    "ViT, 256 images of 32x32": ["model=vit", "data.shape=[3,32,32]", "train.batch_size=256"],
    "GRU, 256 signals of 128": ["model=gru", "data.shape=[4,128]", "train.batch_size=256"],
}
#: 12 width**2 weights a block: 49 million, without the embedding's
WIDTH, DEPTH, CONTEXT = 640, 10, 1024
#: letters of SENTENCES
GPT_VOCABULARY = 27
PROCESSES = multiprocessing.get_context("forkserver")


@dataclass(frozen=True)
class Asked:
    device: str
    is_short: bool

    @property
    def is_cuda(self) -> bool:
        return self.device.startswith("cuda")

    @property
    def ways(self) -> dict[str, list[str]]:
        """Ways to take a step, by name."""
        found = {"eager": []} | ({} if self.is_short else {"compile": [COMPILE]})
        return found | ({"graph": [GRAPH], "compile and graph": [COMPILE, GRAPH]} if self.is_cuda else {})

    @property
    def ways_compared(self) -> dict[str, list[str]]:
        """The ways for comparisons with hand-written loops; compilation last, as it takes minutes on a new machine."""
        return {name: self.ways[name] for name in ("graph", "eager", "compile") if name in self.ways}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=PARTS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--short", action="store_true")
    given = parser.parse_args()
    asked = Asked(given.device, given.short)
    if asked.is_short:
        os.environ["OMP_NUM_THREADS"] = "1"
        torch.set_num_threads(1)
    PROCESSES.set_forkserver_preload(["runner.sweep.launchers.preload"])
    print(header(1, torch.get_num_threads()) + f"\n{name_of(given.device)}:", flush=True)
    for name in given.parts:
        print(f"\n{PARTS[name].__doc__}\n", flush=True)
        PARTS[name](asked)


# --- runs in separate processes


def run(
    words: list[str], folder: Path, *, seconds: float = 100.0, until: str = ""
) -> tuple[int | None, dict[str, Any]]:
    """Run one command; return its exit code (None: it took too long) and its JSON answer, or {"error": its last lines}.

    until: send SIGTERM as soon as this file is in the folder.
    """
    folder.mkdir(exist_ok=True)
    process = PROCESSES.Process(target=_run_here, args=(words, folder))
    process.start()
    end = time.monotonic() + seconds
    while until and process.is_alive() and time.monotonic() < end and not (folder / until).exists():
        time.sleep(0.05)
    if until:
        process.terminate()
    process.join(max(1.0, end - time.monotonic()))
    if process.is_alive():
        process.kill()
        process.join()
        return None, {"error": f"no end within {seconds:.0f} s"}
    try:
        return process.exitcode, json.loads((folder / "out").read_text())
    except ValueError:
        return process.exitcode, {"error": " / ".join((folder / "err").read_text().strip().splitlines()[-3:])[-300:]}


def _run_here(words: list[str], folder: Path) -> None:
    os.chdir(folder)
    for number, name in ((1, "out"), (2, "err")):
        os.dup2(os.open(name, os.O_CREAT | os.O_WRONLY | os.O_TRUNC), number)
    from runner import cli

    code = cli.main([*words, "--json"])
    sys.stdout.flush()
    sys.exit(code)


def trained(words: list[str], asked: Asked, **more: Any) -> dict[str, Any]:
    """The summary of a run. Raises: RuntimeError if it fails."""
    with tempfile.TemporaryDirectory() as folder:
        code, answer = run([*words, f"device={asked.device}"], Path(folder), **more)
    if code:
        raise RuntimeError(f"exit code {code}: {answer.get('error') or answer}")
    return answer


def composed(words: list[str]):
    from runner.config.compose import composed_with, composer

    return composed_with(composer([]), words)


def first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0][:250]}"


def name_of(device: str) -> str:
    return torch.cuda.get_device_name(device) if device.startswith("cuda") else device


# --- correctness


def smoke(asked: Asked) -> None:
    """Short runs of many kinds, several at a time, so their seconds are not measurements."""
    size, steps = ("[3,8,8]", 6) if asked.is_short else ("[3,32,32]", 300)
    images = ["data=synthetic", "data.num_rows=2000", f"data.shape={size}", "train.batch_size=64"]
    images += [f"train.num_steps={steps}"]
    cnn, rows = [*images, "model=cnn"], [*ROWS, "data.num_rows=2000", f"train.num_steps={steps}"]
    text = ["experiment=gpt_characters", f"data.path={SENTENCES}", f"train.num_steps={min(60, steps)}"]
    switches = ["train.clip_grad_norm=1.0", "train.ema_decay=0.99", "train.accumulate_steps=2", "scheduler=cosine"]
    small = ["data.limit=200", "model=linear", "task.plots=false"] * asked.is_short
    cases = {
        "default run, tracked": ["tracking.enabled=true", f"train.num_steps={steps}", *small],
        "cnn, bf16, all switches": [*cnn, "train.precision=bf16", *switches],
        "mlp, muon, guarded": [*rows, "optimizer=muon", "model.hidden_sizes=[64,64]", "placement.guard=always"],
    }  # fmt: skip
    if not asked.is_short:
        cases |= {
            "cnn, compile": [*cnn, COMPILE],
            "cnn, streamed by 2 workers": [*cnn, "data.residency=stream", "data.num_workers=2"],
            "stopped and resumed": [*rows, "train.num_steps=20000", "train.checkpoint_every_steps=50"],
            "gan": ["experiment=gan_rings", "train.num_steps=60"],
            "cnn, augmented, compile": [*cnn, "data.augment=[flip,crop,cutout]", COMPILE],
            "resnet, recomputed": [*images, "model=resnet", "train.recompute=[blocks.*]"],
            "gru, metrics, profiled": ["data=synthetic", "data.shape=[4,64]", "model=gru", "task.metrics=[f1,auroc]", "train.profile=5"],
        }  # fmt: skip
    if asked.is_cuda:
        graphed = [*cnn, GRAPH]
        cases |= {
            "cnn, graph": graphed,
            "cnn, graph, all switches": [*graphed, *switches],
            "cnn, graph, fp16": [*graphed, "train.precision=fp16"],
            "cnn, graph, tf32, validated every 20 steps": [*graphed, "train.precision=tf32", "train.evaluate_every_steps=20"],
            "cnn, deterministic": [*cnn, "train.deterministic=true"],
            "cnn, deterministic, graph": [*graphed, "train.deterministic=true"],
            "cnn, fp16, clipped": [*cnn, "train.precision=fp16", "train.clip_grad_norm=1.0"],
            "mlp, compile and graph": [*rows, GRAPH, COMPILE],
            "cnn, bf16, compile and graph": [*graphed, COMPILE, "train.precision=bf16"],
            "vit, bf16, graph": [*images, "model=vit", GRAPH, "train.precision=bf16"],
            "gpt, bf16, compile and graph": [*text, GRAPH, COMPILE, "train.precision=bf16"],
            "out of memory, split": [
                "data=synthetic", "data.num_rows=24576", "data.shape=[3,32,32]", "model=cnn", "train.batch_size=12288",
                "train.num_steps=4", "train.on_oom=split", "backends.cuda.memory_fraction=0.03", "data.residency=stream",
            ],
        }  # fmt: skip
    head("run", "result", "steps", "train/loss", "val/loss", "unexpected reads", "peak, MiB", "s")

    def one(name: str, folder: Path) -> tuple[object, ...]:
        quiet = [] if "tracked" in name else QUIET_TEXT if name.startswith("gpt") else QUIET
        words, began = [f"device={asked.device}", *quiet, *cases[name], "hydra.run.dir=run"], time.perf_counter()
        if name.startswith("stopped"):
            run(words, folder, until="run/checkpoints/last.pt")
            words = ["resume", "run"]
        code, found = run(words, folder)
        seconds = f"{time.perf_counter() - began:.0f}"
        if code or "metrics" not in found:
            return f"FAILED, exit code {code}", found.get("error") or found.get("so", ""), "", "", "", "", seconds
        metrics = found["metrics"]
        losses = [f"{metrics[key]:.5f}" if key in metrics else "" for key in ("train/loss", "val/loss")]
        reads, peak = found["host_reads"]["unexpected"], found["peak_memory_bytes"] / 2**20
        return found["status"], found["num_steps"], *losses, reads, f"{peak:.0f}", seconds

    with tempfile.TemporaryDirectory() as place, ThreadPoolExecutor(2 if asked.is_short else 7) as pool:
        waiting = {pool.submit(one, name, Path(place) / str(number)): name for number, name in enumerate(cases)}
        for done in as_completed(waiting):
            row(waiting[done], *done.result())


def graphs(asked: Asked) -> None:
    """Graph runs in one process, and a capture while a dead graph waits for Python's garbage collector."""
    from runner import run as run_here
    from runner.training.step.cuda_graphs import cuda_graphs

    head("what", "result")
    gc.set_threshold(200, 2, 2)
    for number in range(1 if asked.is_short else 4):
        words = ["model=mlp", "train.num_epochs=2", *QUIET, f"seed={number}", f"device={asked.device}"]
        with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
            found = run_here([*words, *([GRAPH] if asked.is_cuda else [])], folder=folder)
        row(f"run {number + 1} in one process", f"{found['status']} {found['error'] or ''}")
    if asked.is_cuda:
        torch.cuda.set_device(asked.device)
        capture, x = cuda_graphs().capture, torch.zeros(1, device=asked.device)
        cycle = SimpleNamespace(replay=capture(lambda: x.add_(1)))
        cycle.own = cycle
        del cycle
        capture(lambda: [x.add_(1) for _ in range(2000)])
        row("a dead graph, then a capture", "works")


def several(asked: Asked) -> None:
    """DDP and FSDP2 by NCCL in a group of one process, compared with a run that has no group."""
    from runner.data.loading.batches import Shard
    from runner.distributed.environment import RankInfo
    from runner.distributed.gradients import ShardedGradients, SharedGradients
    from runner.distributed.group import join
    from runner.distributed.sharding import dividing
    from runner.experiment.build import prepare
    from runner.training.step.train_step import StepOptions, make_step

    device, port = torch.device(asked.device), 20_000 + os.getpid() % 9_000
    os.environ |= {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    place = RankInfo(0, 1, 0, 1, "127.0.0.1", port, "torchrun")
    group = join(place, backend="nccl" if asked.is_cuda else "gloo", device=device)
    head("what", "precision", "result")
    for precision in ("fp32", "bf16")[asked.is_short :]:
        words = ["model=cnn", f"train.precision={precision}", *QUIET, "train.num_steps=20", f"device={device}"]
        words += ["data.limit=100", "model.channels=[4]"] * asked.is_short
        losses: dict[str, Any] = {}
        for way in ("no group", "DDP", "FSDP2"):
            try:
                parts = prepare(composed(words), device, divide=dividing(device, 1) if way == "FSDP2" else None)
                shared: Any = None
                if way == "DDP":
                    shared = SharedGradients(parts.model, parts.task, num=1, unused_parameters=False)
                elif way == "FSDP2":
                    shared = ShardedGradients(parts.shards, parts.task, num=1)
                step = make_step(
                    parts.model,
                    shared.task if shared else parts.task,
                    optimizer=parts.optimizer,
                    precision=parts.precision,
                    options=StepOptions(own_batches=shared.own_batches if shared else None),
                )
                batches = parts.train.epoch(0, shard=Shard() if shared else None)
                losses[way] = torch.stack([step((batch,))["loss"].detach() for batch in batches])
                apart = (losses[way] - losses["no group"]).abs().max()
                row(way, precision, f"{len(losses[way])} steps, losses differ by at most {apart:.1e}")
            except Exception as error:
                row(way, precision, f"FAILED, {first_line(error)}")
    group.leave()


# --- speed and memory


def groups(asked: Asked) -> None:
    """Many seeds of an MLP on digits: in groups, separately, and both with NVIDIA MPS if it can be started."""
    many, few = (4, 2) if asked.is_short else (64, 6)
    apart = [f"seed=range({few})", "sweep.batch=off"]
    cases = {
        f"{many}, automatic": [f"seed=range({many})"],
        f"{many}, one group": [f"seed=range({many})", "sweep.batch=128"],
        f"{few}, one at a time": apart,
        f"{few}, three at a time": [*apart, f"sweep.slots.{asked.device.partition(':')[0]}=3"],
    }
    if asked.is_short:
        cases = {name: [*cases[name], *QUIET, "train.num_steps=5"] for name in list(cases)[:1]}
    head(
        "seeds",
        "exit code",
        "s",
        "finished",
        "longest training, s",
        "sum of evaluations, s",
        "train/loss of seed 0",
        "note",
    )
    for name in cases:
        _group(name, cases[name], asked)
    if asked.is_cuda and shutil.which("nvidia-cuda-mps-control"):
        with tempfile.TemporaryDirectory() as pipes:
            os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": pipes, "CUDA_MPS_LOG_DIRECTORY": pipes}
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=False)
            for name in (f"{many}, automatic", f"{few}, three at a time"):
                _group(f"{name}, MPS", cases[name], asked)
            subprocess.run(["nvidia-cuda-mps-control"], input="quit\n", text=True, timeout=20, check=False)


def _group(name: str, words: list[str], asked: Asked) -> None:
    # a new interpreter: a sweep forks its jobs from a process that has no CUDA context
    command = [*RUNNER, "-m", "model=mlp", f"device={asked.device}", *words, "hydra.sweep.dir=sweep"]
    streams = {"capture_output": True, "text": True, "check": False}
    with tempfile.TemporaryDirectory() as folder:
        began = time.perf_counter()
        done = subprocess.run(command, cwd=folder, env=environment(None), **streams)
        seconds = time.perf_counter() - began
        jobs = [json.loads(each.read_text()) for each in sorted(Path(folder).glob("sweep/*/summary.json"))]
        notes = [line for log in Path(folder).glob("sweep/*/console.log") for line in log.read_text().splitlines()]
    finished = [job for job in jobs if job.get("status") == "finished"]
    longest = max((job["seconds"]["train"] for job in finished), default=0.0)
    evaluated = sum(job["seconds"]["evaluate"] for job in finished)
    loss = finished[0]["metrics"]["train/loss"] if finished else None
    note = next((line for line in notes if line.startswith("batch:")), "")[:200] if finished else done.stderr[-300:]
    row(name, done.returncode, f"{seconds:.1f}", len(finished), f"{longest:.1f}", f"{evaluated:.1f}", loss, note)


def steps(asked: Asked) -> None:
    """A step in each way, without validation and tracking."""
    from runner.experiment.build_data import prepare_data
    from runner.tools.tune.measure import Candidate

    models = {"mlp": ROWS, "cnn": ["data=synthetic", "data.shape=[3,32,32]", "model=cnn"]}
    models |= {"vit, bf16": [*MODELS["ViT, 256 images of 32x32"], "data=synthetic", "train.precision=bf16"]}
    device, seconds = torch.device(asked.device), 0.02 if asked.is_short else 0.3
    head("model", "way", "us")
    for name in list(models)[: 1 if asked.is_short else 3]:
        for way, more in asked.ways.items():
            words = [*models[name], "data.num_rows=8192", *WITHOUT_SPLITS, *QUIET, "placement.guard=off", *more]
            try:
                cfg = composed([*words, "train.num_steps=1000000", f"device={device}"])
                with closing(Candidate(cfg, device, read=prepare_data(cfg, device))) as candidate:
                    found = statistics.median(candidate.seconds_a_step(seconds) for _ in range(5))
                row(name, way, f"{found * 1e6:.0f}")
            except Exception as error:
                row(name, way, f"FAILED, {first_line(error)}")
            gc.collect()


def syncs(asked: Asked) -> None:
    """Steps that wait for the device, as torch counts them on CUDA."""
    from runner import run as run_here
    from runner.training.step import on_device, train_step

    def counted(taken):  # only the steps: a run may wait before and after them
        def steps(self, *given, **more):
            if asked.is_cuda:
                torch.cuda.set_sync_debug_mode("warn")
            try:
                yield from taken(self, *given, **more)
            finally:
                if asked.is_cuda:
                    torch.cuda.set_sync_debug_mode("default")

        return steps

    num_steps = 30 if asked.is_short else 1000
    kinds = (train_step.EagerSteps, on_device.OnDevice)
    before = [kind.epoch for kind in kinds]
    for kind in kinds:
        kind.epoch = counted(kind.epoch)
    head("steps", "waits of the steps", "pulls", "unexpected reads")
    words = [
        *ROWS,
        "data.num_rows=5000",
        *WITHOUT_SPLITS,
        *QUIET,
        f"train.num_steps={num_steps}",
        "placement.guard=off",
    ]
    for way in ("eager", "graph")[: 1 + asked.is_cuda]:
        with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with redirect_stdout(sys.stderr):
                found = run_here([*words, *asked.ways[way], f"device={asked.device}"], folder=folder)
        waits = sum("called a synchronizing" in str(each.message) for each in said)
        row(f"{num_steps:,}, {way}", waits, found["host_reads"]["pulls"], found["host_reads"]["unexpected"])
    for kind, steps in zip(kinds, before, strict=True):
        kind.epoch = steps


def memory(asked: Asked) -> None:
    """The plan's peak compared with the allocator's, MiB."""
    head("model", "planned", *asked.ways, "eager, without cuDNN's trials", "planned / eager")
    for name in list(MODELS)[: 1 if asked.is_short else None]:
        words = ["data=synthetic", f"data.num_rows={512 if asked.is_short else 8192}", *MODELS[name], *WITHOUT_SPLITS]
        words += ["train.num_steps=12", *(["train.batch_size=64", "model.hidden_sizes=[8]"] if asked.is_short else [])]
        ways = {**asked.ways, "trials off": ["backends.cuda.cudnn_benchmark=false"]}
        try:
            planned = trained(["plan", *words], asked)["memory"]["peak_bytes"] / 2**20
            peaks = [trained([*words, *QUIET, *more], asked)["peak_memory_bytes"] / 2**20 for more in ways.values()]
            row(name, f"{planned:,.0f}", *(f"{peak:,.0f}" for peak in peaks), f"{planned / peaks[0]:.2f}")
        except RuntimeError as error:
            row(name, f"FAILED, {error}")


def gpt(asked: Asked) -> None:
    """A GPT of 50 million parameters in bf16, and a hand-written loop of it.

    Operations: 6 per weight and token, 12 per width and pair of places (Kaplan et al. 2020, PaLM).
    """
    width, depth, context = (64, 2, 64) if asked.is_short else (WIDTH, DEPTH, CONTEXT)
    size, num_steps = (2, 30) if asked.is_short else (16, 150)
    words = ["experiment=gpt_characters", f"data.path={SENTENCES}", *WITHOUT_SPLITS, *QUIET_TEXT]
    words += [f"data.context_length={context}", f"model.width={width}", f"model.depth={depth}"]
    words += [f"model.num_heads={width // 64}", f"train.batch_size={size}", f"train.num_steps={num_steps}"]
    words += ["train.precision=bf16", "metrics.pull_every=10"]
    memory_bytes = torch.cuda.get_device_properties(asked.device).total_memory if asked.is_cuda else 0
    sheet = data_sheet(name_of(asked.device), memory_bytes)
    head("way", "tokens/s", "TFLOP/s", "of the data sheet's", "hand-written, tokens/s", "hand-written / runner")

    def by_hand(*, is_compiled: bool) -> float:
        torch.manual_seed(0)
        model = GPT(GPT_VOCABULARY, context, width, depth, width // 64, positions="rotary").to(asked.device)
        shape = {"vocab_size": GPT_VOCABULARY, "context_length": context, "batch_size": size}
        return train_gpt(model, **shape, num_steps=num_steps, is_compiled=is_compiled).step_seconds

    for way, more in asked.ways_compared.items():
        try:
            found = trained([*words, *more], asked)
        except RuntimeError as error:
            row(way, f"FAILED, {error}", "", "", "", "")
            continue
        tokens = found["num_samples"] / found["num_steps"] * context / found["step"]["seconds"]
        flops = (72 * width**2 * depth + 12 * depth * width * context) * tokens
        share = f"{flops / sheet.speeds.flops_per_second['bf16']:.1%}" if sheet else "no data sheet"
        hand = size * context / by_hand(is_compiled="compile" in way)
        row(way, f"{tokens:,.0f}", f"{flops / 1e12:.3g}", share, f"{hand:,.0f}", f"{hand / tokens:.3f}")


def data_sheet(name: str, memory_bytes: int):
    """Return the entry of the device catalogue that a CUDA device's name and memory mean; None without one."""
    from runner.tools.plan.device_catalogue import MODELS as KINDS

    words = set(re.split("[ -]", name))
    is_other = words & {"Ti", "SUPER", "Laptop", "MIG"} or (words & {"H100", "H200"} and words & {"PCIe", "NVL"})
    families = {key: set(re.sub(r"-\d+GB$", "", key).split("-")) for key, kind in KINDS.items() if kind.kind == "cuda"}
    found = [KINDS[key] for key, family in families.items() if family <= words and not is_other]
    return min(found, key=lambda kind: abs(kind.memory_bytes - memory_bytes), default=None)


def cifar(asked: Asked) -> None:
    """`experiment=cifar10_94`, and a hand-written loop of it: seconds of a whole training, and of a step."""
    shape, channels, num_rows, size, epochs = [3, 32, 32], [64, 256, 256], 60_000, 1024, 10
    if asked.is_short:
        shape, channels, num_rows, size, epochs = [3, 8, 8], [8], 300, 32, 2
    words = ["experiment=cifar10_94", *QUIET, f"data.num_rows={num_rows}", f"data.shape={shape}".replace(" ", "")]
    words += [f"model.channels={channels}".replace(" ", ""), f"train.batch_size={size}", f"train.num_epochs={epochs}"]
    head("precision", "way", "training, s", "a step, ms", "hand-written, s", "a step, ms", "runner / hand-written")

    def by_hand(precision: str, *, is_compiled: bool) -> Measured:
        torch.manual_seed(0)
        set_float32(has_tf32_products=precision == "tf32", has_tf32_cudnn=True)
        torch.backends.cudnn.benchmark = True
        model = CNN(shape, 10, channels).to(asked.device, memory_format=torch.channels_last)
        rows = num_rows - round(num_rows / 6)
        return train_cifar(
            model, shape=shape, num_rows=rows, batch_size=size, num_epochs=epochs, is_compiled=is_compiled
        )

    for precision in ("tf32", "fp32") if asked.is_cuda else ("fp32",):
        for way, more in asked.ways_compared.items():
            try:
                found = trained([*words, *more, f"train.precision={precision}"], asked, seconds=120)
            except RuntimeError as error:
                row(precision, way, f"FAILED, {error}", "", "", "", "")
                continue
            hand = by_hand(precision, is_compiled="compile" in way)
            seconds, step = found["seconds"]["train"], found["step"]["seconds"]
            cells = [f"{seconds:.2f}", f"{step * 1e3:.2f}", f"{hand.seconds:.2f}", f"{hand.step_seconds * 1e3:.2f}"]
            row(precision, way, *cells, f"{seconds / hand.seconds:.2f}, a step {step / hand.step_seconds:.2f}")


PARTS = {part.__name__: part for part in (groups, graphs, smoke, several, steps, memory, gpt, cifar, syncs)}

if __name__ == "__main__":
    main()

"""The common parts of all peers: the command line, the data, the network, the clock, and the JSON line at the end.

Sizes: `mlp` is digits repeated to 60,000 rows and 64-128-10; `cnn` 32x32x3 images and `transformer` rows of 32 tokens, both
generated from a seed. Batches of 128 (`transformer`: 32), Adam, cross-entropy; the loss and accuracy of a step are logged.
"""

from __future__ import annotations

import argparse
import json
import logging
import resource
import sqlite3
import sys
import time
import warnings
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset
from work_models import NUM_TOKENS, VOCAB_SIZE, Net

NUM_ROWS, HIDDEN, BATCH_SIZE, LEARNING_RATE, SEED = 60_000, 128, 128, 1e-3, 0
NUM_MADE_ROWS = 4096  # of images and of tokens
NUM_JUDGED_ROWS = 2048  # for the loss at the end
WARM_STEPS = 50  # for the work that a library does once


@dataclass(frozen=True)
class Work:
    size: str
    steps: int
    log_every: int  # 0: nothing is logged
    device: torch.device
    threads: int
    store: str  # an sqlite file for this measurement only
    variant: str
    words: tuple[str, ...]  # for our command line
    import_seconds: float  # from the start of the process to its first line of code

    @property
    def batch_size(self) -> int:
        return 32 if self.size == "transformer" else BATCH_SIZE

    @property
    def uri(self) -> str:
        return f"sqlite:///{self.store}"

    def is_logged(self, step: int) -> bool:
        return self.log_every > 0 and step % self.log_every == 0


def arguments() -> Work:
    """Return the command line of every peer, and silence the messages of libraries."""
    work = parsed(sys.argv[1:])
    torch.set_num_threads(work.threads)
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    return work


def parsed(words: list[str]) -> Work:
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", choices=("mlp", "cnn", "transformer"), default="mlp")
    parser.add_argument("--steps", type=int, default=2345)
    parser.add_argument("--log-every", type=int, default=1)
    parser.add_argument("--device", type=torch.device, default="cpu")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--store", required=True)
    parser.add_argument("--variant", default="")
    parser.add_argument("--words", default="", help="more words for our command line, with spaces between them")
    given = vars(parser.parse_args(words))
    import_seconds = time.time() - psutil.Process().create_time()
    return Work(**given | {"words": tuple(given["words"].split()), "import_seconds": import_seconds})


def arrays(size: str = "mlp") -> tuple[np.ndarray, np.ndarray]:
    """Inputs and int64 classes: (60000, 64) float32, (4096, 3, 32, 32) float32 or (4096, 32) int64."""
    draw = np.random.default_rng(SEED)
    if size == "mlp":
        from sklearn.datasets import load_digits  # takes a second, which is not part of any loop

        digits = load_digits()
        rows = np.arange(NUM_ROWS) % len(digits.target)
        return (digits.data / 16).astype(np.float32)[rows], digits.target.astype(np.int64)[rows]
    targets = draw.integers(10, size=NUM_MADE_ROWS)
    if size == "cnn":
        patterns = draw.standard_normal((10, 3, 32, 32), dtype=np.float32)
        return 0.2 * patterns[targets] + draw.standard_normal((NUM_MADE_ROWS, 3, 32, 32), dtype=np.float32), targets
    tokens = draw.integers(VOCAB_SIZE, size=(NUM_MADE_ROWS, NUM_TOKENS))
    of_class = targets[:, None] * 25 + draw.integers(25, size=tokens.shape)
    return np.where(draw.random(tokens.shape) < 0.2, of_class, tokens), targets


def tensors(work: Work) -> tuple[Tensor, Tensor]:
    inputs, targets = arrays(work.size)
    return torch.from_numpy(inputs), torch.from_numpy(targets)


def network(work: Work) -> Net:
    """Return the network with the same initial weights for every peer that builds it here."""
    torch.manual_seed(SEED)
    return Net(work.size)


def adam(model: nn.Module) -> torch.optim.Adam:
    """Return torch's fastest Adam, so that the optimizer slows no peer down."""
    return torch.optim.Adam(model.parameters(), lr=LEARNING_RATE, fused=True)


def sampler(dataset: Dataset, work: Work) -> RandomSampler:
    """Return a sampler of consecutive whole permutations: one long epoch with exactly the requested number of steps."""
    return RandomSampler(dataset, num_samples=work.steps * work.batch_size)


def loader(work: Work) -> DataLoader:
    """Return a DataLoader without workers, which cost more time than they save for rows in memory."""
    dataset = TensorDataset(*tensors(work))
    pins = work.device.type == "cuda"
    return DataLoader(dataset, batch_size=work.batch_size, sampler=sampler(dataset, work), pin_memory=pins)


def accuracy(logits: Tensor, targets: Tensor) -> Tensor:
    return (logits.detach().argmax(1) == targets).float().mean()


class Clock:
    """begin() before the first step, tick() at the beginning of each step, end() after the last; all wait for the device."""

    def __init__(self, work: Work) -> None:
        self.num_steps = 0
        self.seconds = 0.0
        self.seconds_steady: float | None = None
        self._device = work.device
        self._began = self._warm = 0.0

    def begin(self, *_: object) -> None:
        self.num_steps = 0  # a library may run a forward pass before
        self._began = self._now()

    def tick(self, *_: object) -> None:
        if self.num_steps == WARM_STEPS:
            self._warm = self._now()
        self.num_steps += 1

    def end(self, *_: object) -> None:
        now = self._now()
        self.seconds = now - self._began
        self.seconds_steady = now - self._warm if self.num_steps > WARM_STEPS else None

    def watch(self, model: nn.Module) -> None:
        """Tick at each forward pass, for a library's loop."""
        model.register_forward_pre_hook(self.tick)

    def _now(self) -> float:
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter()


def tell(work: Work, clock: Clock, model: nn.Module) -> None:
    """Print the line of a peer that trained here."""
    say(
        num_steps=clock.num_steps,
        seconds=clock.seconds,
        seconds_steady=clock.seconds_steady,
        num_steps_steady=max(0, clock.num_steps - WARM_STEPS),
        points=stored_points(work),
        loss=judged(work, model),
        peak_memory_bytes=peak_memory_bytes(resource.RUSAGE_SELF),
        import_seconds=work.import_seconds,
    )


def say(**fields: float | None) -> None:
    """Print one JSON line, as the last output of a peer."""
    print(json.dumps(fields), flush=True)


def judged(work: Work, model: nn.Module) -> float:
    """Return the mean loss over the first rows, without gradients, in eval mode."""
    inputs, targets = (part[:NUM_JUDGED_ROWS] for part in tensors(work))
    model.cpu().eval()
    with torch.no_grad():
        return F.cross_entropy(model(inputs), targets).item()


def stored_points(work: Work) -> int:
    """Return the number of points in the store after the run: only stored points count."""
    if not Path(work.store).exists():
        return 0
    with sqlite3.connect(work.store) as store:
        return store.execute("select count(*) from metrics").fetchone()[0]


def peak_memory_bytes(whose: int) -> int:
    peak = resource.getrusage(whose).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024

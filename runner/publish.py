"""The folder of a run goes in; its page in MLflow comes out. The process that runs beside training: `-m runner.publish`."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import signal
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import mlflow

from runner.targets import build
from runner.tracking import store
from runner.tracking.journal import read_events
from runner.tracking.uploader import Unreachable, Uploader

NOT_DELIVERED = 3
#: how often it looks by itself; a run says when it has news
SECONDS_BETWEEN_LOOKS = 1.0
SECONDS_BETWEEN_SYSTEM_METRICS = 1.0


def main(folder: Path) -> int:
    """Copies the journal until the training has said goodbye or is gone. Returns 0, or 3 when something is left."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the training
    _be_quiet()
    uri = os.environ["MLFLOW_TRACKING_URI"]
    pipe = Pipe(sys.stdin.fileno(), grace_seconds=float(os.environ.get("RUNNER_GRACE_SECONDS", "10")))
    uploader = Uploader(
        folder, uri, patience=pipe.patience, publish_model=lambda *event: publish_model(*event, uri=uri)
    )
    try:
        uploader.connect()
        with contextlib.ExitStack() as stack:
            started = False
            while True:
                open_before = (
                    pipe.is_open
                )  # looked at before draining: nothing that was written before the end is missed
                uploader.drain()
                if uploader.ack.run_id and not started:
                    started = True
                    stack.enter_context(_beside(uploader))
                if not open_before:
                    break
                pipe.wait(SECONDS_BETWEEN_LOOKS)
        uploader.end("KILLED", end_ms=int(time.time() * 1000), why="the process ended without a word")
    except Unreachable as silence:
        print(f"not delivered: {silence}", flush=True)
        return NOT_DELIVERED
    return 0


class Pipe:
    """The training's end of the line: a byte is news, its closing is the end."""

    def __init__(self, file: int, *, grace_seconds: float) -> None:
        self.is_open = True
        self._file, self._grace_seconds = file, grace_seconds
        self._closed_at = 0.0

    def wait(self, seconds: float) -> None:
        """Returns when there is news or the time is over."""
        if select.select([self._file], [], [], seconds)[0] and not os.read(self._file, 65536):
            self.is_open, self._closed_at = False, time.monotonic()

    def patience(self, silent_seconds: float) -> bool:
        """Any silence is waited out while the training lives; after it, the grace period."""
        if self.is_open:
            self.wait(0)
        return self.is_open or min(silent_seconds, time.monotonic() - self._closed_at) < self._grace_seconds


@contextlib.contextmanager
def _beside(uploader: Uploader) -> Iterator[None]:
    """What the run wants besides its points: the machine's load, and torch loaded before the model comes."""
    start = next(record.data for record in read_events(uploader.folder) if record.event == "start")
    monitor = None
    if start["system_metrics"] and not uploader.ack.ended:
        from mlflow.system_metrics.system_metrics_monitor import SystemMetricsMonitor

        monitor = SystemMetricsMonitor(uploader.run_id, sampling_interval=SECONDS_BETWEEN_SYSTEM_METRICS)
        monitor.start()
    if start["expects_model"]:
        import torch  # noqa: F401  a second that the end of the run does not wait for
    try:
        yield
    finally:
        if monitor is not None:
            monitor.finish()


def publish_model(folder: Path, run_id: str, event: dict[str, Any], *, uri: str) -> None:
    """Builds the model again from its configuration and its best weights, and logs it with a signature and an example.

    As an exported graph (pt2) where torch can export it: that loads without this package and without pickle.
    """
    import torch

    model = build(event["node"], key="model").eval()
    weights = torch.load(folder / event["weights"], map_location="cpu", weights_only=True)["model"]
    model.load_state_dict(weights)
    example = torch.load(folder / event["example"], weights_only=True)
    with torch.inference_mode():
        outputs = model(example)
    signature = mlflow.models.infer_signature(example.numpy(), outputs.float().numpy())
    mlflow.set_tracking_uri(uri)
    settings: dict[str, Any] = {
        "name": "model",
        "signature": signature,
        "input_example": example.numpy(),
        "pip_requirements": [f"torch=={torch.__version__.partition('+')[0]}", f"mlflow=={mlflow.__version__}", "numpy"],
    }
    with mlflow.start_run(run_id=run_id):
        try:
            mlflow.pytorch.log_model(model, serialization_format="pt2", **settings)
        except Exception as error:
            print(f"the model can't be exported as a graph ({type(error).__name__}); it is pickled instead", flush=True)
            mlflow.pytorch.log_model(model, serialization_format="pickle", code_paths=_own_code(model), **settings)


def _own_code(model: Any) -> list[str] | None:
    """The file or the package of the current folder that the model's class comes from."""
    first = type(model).__module__.split(".")[0]
    found = [path for path in (Path.cwd() / f"{first}.py", Path.cwd() / first) if path.exists()]
    return [str(found[0])] if found and first != "runner" else None


def _be_quiet() -> None:
    warnings.simplefilter("ignore")
    for name in ("mlflow", "alembic", "urllib3", "torch"):
        logging.getLogger(name).setLevel(logging.ERROR)


if __name__ == "__main__":
    try:
        sys.exit(main(Path(sys.argv[1])))
    except Exception as error:
        print(store.without_password(f"{type(error).__name__}: {error}"), flush=True)
        raise

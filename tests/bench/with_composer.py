"""Composer: a ComposerClassifier with its train metric, the Trainer, and its MLFlowLogger.

mosaicml 0.32.1 requires torch<2.7.1 and works with 2.13: `pip install --no-deps mosaicml mosaicml-cli torch_optimizer
pytorch_ranger`, then, with torch pinned, torchvision (of the same index as torch) and coolname py-cpuinfo tabulate
torchmetrics tqdm backoff gql[websockets] validators questionary ruamel.yaml argcomplete arrow.
"""

from __future__ import annotations

from typing import Any

from composer import Callback, Trainer
from composer.loggers import MLFlowLogger
from composer.models import ComposerClassifier
from torch.nn import functional as F
from torchmetrics import MetricCollection
from work import Clock, Work, adam, arguments, loader, network, tell


class EachNth(MLFlowLogger):
    """Logs every Nth batch. Composer logs each batch; a lower frequency needs a subclass."""

    def __init__(self, work: Work) -> None:
        super().__init__(tracking_uri=work.uri, log_system_metrics=False, log_duplicated_metric_every_n_steps=1)
        self.is_logged = work.is_logged

    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        found = {name: value for name, value in metrics.items() if name.startswith(("loss/", "metrics/"))}
        if found and self.is_logged((step or 0) + 1):  # Composer counts from 0
            super().log_metrics(found, step)


class Timed(Callback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def fit_start(self, *_: Any) -> None:
        self.clock.begin()

    def fit_end(self, *_: Any) -> None:
        self.clock.end()


def main() -> None:
    work = arguments()
    clock = Clock(work)
    net = network(work)
    clock.watch(net)
    unmeasured = {} if work.log_every else {"train_metrics": MetricCollection([]), "val_metrics": MetricCollection([])}
    model = ComposerClassifier(net, num_classes=10, loss_fn=F.cross_entropy, **unmeasured)
    trainer = Trainer(
        model=model,
        train_dataloader=loader(work),
        max_duration=f"{work.steps}ba",
        optimizers=adam(model),
        loggers=EachNth(work) if work.log_every else None,
        callbacks=Timed(clock),
        device="gpu" if work.device.type == "cuda" else "cpu",
        progress_bar=False,
    )
    trainer.fit()
    trainer.close()
    tell(work, clock, net)


main()

"""skorch: a NeuralNetClassifier and its MlflowLogger, the accuracy recorded in its step."""

from __future__ import annotations

from typing import Any

import mlflow
import torch
from skorch import NeuralNetClassifier
from skorch.callbacks import MlflowLogger
from torch import nn
from torch.utils.data import TensorDataset
from work import LEARNING_RATE, Clock, Work, accuracy, arguments, network, sampler, tell, tensors


class Measured(NeuralNetClassifier):
    def train_step(self, batch: Any, **settings: Any) -> dict[str, Any]:
        found = super().train_step(batch, **settings)
        if self.callbacks:
            self.history.record_batch("train_accuracy", accuracy(found["y_pred"], batch[1].to(self.device)).item())
        return found

    def on_train_begin(self, net: Any, X: Any = None, y: Any = None, **settings: Any) -> None:
        super().on_train_begin(net, X, y, **settings)
        CLOCKS[0].begin()

    def on_train_end(self, net: Any, X: Any = None, y: Any = None, **settings: Any) -> None:
        CLOCKS[0].end()
        super().on_train_end(net, X, y, **settings)


CLOCKS: list[Clock] = []  # skorch copies a net's arguments


class EachNth(MlflowLogger):
    """Logs every Nth batch. skorch logs each batch or each epoch; an interval in between needs a subclass."""

    def __init__(self, work: Work) -> None:
        super().__init__(
            create_artifact=False, log_on_batch_end=True, log_on_epoch_end=False, keys_ignored=["train_batch_size"]
        )
        self.work = work

    def _iteration_log(self, logs: Any, suffix: str, step: int) -> None:
        if self.work.is_logged(step):
            super()._iteration_log(logs, suffix, step)


def main() -> None:
    work = arguments()
    CLOCKS.append(Clock(work))
    model = network(work).to(work.device)
    CLOCKS[0].watch(model)
    if work.log_every:
        mlflow.set_tracking_uri(work.uri)
        mlflow.start_run()
    dataset = TensorDataset(*tensors(work))
    net = Measured(
        model,
        criterion=nn.CrossEntropyLoss,
        optimizer=torch.optim.Adam,
        optimizer__fused=True,
        lr=LEARNING_RATE,
        batch_size=work.batch_size,
        max_epochs=1,
        train_split=None,
        iterator_train__sampler=sampler(dataset, work),
        callbacks=[EachNth(work)] if work.log_every else None,
        callbacks__valid_acc=None,
        callbacks__print_log=None,
        device=str(work.device),
        verbose=0,
    )
    net.fit(dataset, None)
    mlflow.end_run()
    tell(work, CLOCKS[0], net.module_)


main()

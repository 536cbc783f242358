"""Lightning: a LightningModule with `self.log`, the Trainer's loop, and its MLFlowLogger."""

from __future__ import annotations

import lightning
import torch
from lightning.pytorch.loggers import MLFlowLogger
from torch import Tensor, nn
from torch.nn import functional as F
from work import Clock, Work, accuracy, adam, arguments, loader, network, tell


class Classifier(lightning.LightningModule):
    def __init__(self, net: nn.Module, work: Work, clock: Clock) -> None:
        super().__init__()
        self.net, self.work, self.clock = net, work, clock

    def training_step(self, batch: tuple[Tensor, Tensor], index: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = F.cross_entropy(logits, y)
        if self.work.log_every:
            self.log_dict({"train/loss": loss, "train/accuracy": accuracy(logits, y)})
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return adam(self)

    def on_train_start(self) -> None:
        self.clock.begin()

    def on_train_end(self) -> None:
        self.clock.end()


def main() -> None:
    work = arguments()
    clock = Clock(work)
    model = network(work)
    clock.watch(model)
    is_cuda = work.device.type == "cuda"
    trainer = lightning.Trainer(
        accelerator="gpu" if is_cuda else "cpu",
        devices=[work.device.index or 0] if is_cuda else 1,
        max_steps=work.steps,
        logger=MLFlowLogger(tracking_uri=work.uri) if work.log_every else False,
        log_every_n_steps=work.log_every or None,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Classifier(model, work, clock), loader(work))
    tell(work, clock, model)


main()

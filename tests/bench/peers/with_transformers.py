"""Hugging Face's Trainer: its loop, its MLflow callback, and the accuracy added to the logged values."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset
from transformers import PrinterCallback, Trainer, TrainerCallback, TrainingArguments
from work import LEARNING_RATE, Clock, accuracy, arguments, network, tell, tensors


class Classifier(nn.Module):
    """A model in the Trainer's form: it returns the loss with the logits."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, inputs: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.net(inputs)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


class Measured(Trainer):
    """Keeps the accuracy of the last step, for the log of the loss."""

    def compute_loss(self, model: nn.Module, inputs: dict[str, Tensor], **settings: Any) -> Tensor:
        found = model(**inputs)
        if self.args.report_to:
            self.last = accuracy(found["logits"], inputs["labels"])
        return found["loss"]

    def log(self, logs: dict[str, float], *args: Any, **settings: Any) -> None:
        if "loss" in logs:
            logs = {"train/loss": logs["loss"], "train/accuracy": self.last.item()}
            super().log(logs, *args, **settings)


class Timed(TrainerCallback):
    def __init__(self, clock: Clock) -> None:
        self.clock = clock

    def on_train_begin(self, *args: Any, **settings: Any) -> None:
        self.clock.begin()

    def on_train_end(self, *args: Any, **settings: Any) -> None:
        self.clock.end()


def collate(rows: list[tuple[Tensor, Tensor]]) -> dict[str, Tensor]:
    inputs, labels = zip(*rows, strict=True)
    return {"inputs": torch.stack(inputs), "labels": torch.stack(labels)}


def main() -> None:
    work = arguments()
    os.environ["MLFLOW_TRACKING_URI"] = work.uri
    clock = Clock(work)
    model = network(work)
    clock.watch(model)
    settings = TrainingArguments(
        output_dir=str(Path(work.store).parent),
        max_steps=work.steps,
        per_device_train_batch_size=work.batch_size,
        optim="adamw_torch_fused",
        weight_decay=0.0,  # makes AdamW equal to Adam
        learning_rate=LEARNING_RATE,
        lr_scheduler_type="constant",
        max_grad_norm=0.0,  # no clipping, like the other peers
        logging_strategy="steps" if work.log_every else "no",
        logging_steps=work.log_every or 1,
        report_to="mlflow" if work.log_every else "none",
        save_strategy="no",
        disable_tqdm=True,
        use_cpu=work.device.type == "cpu",
        remove_unused_columns=False,
    )
    trainer = Measured(
        Classifier(model),
        settings,
        train_dataset=TensorDataset(*tensors(work)),
        data_collator=collate,
        callbacks=[Timed(clock)],
    )
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    tell(work, clock, model)


main()

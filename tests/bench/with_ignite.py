"""Ignite: create_supervised_trainer, its MLflowLogger with an output handler."""

from __future__ import annotations

from ignite.engine import Events, create_supervised_trainer
from ignite.handlers.mlflow_logger import MLflowLogger, global_step_from_engine
from torch.nn import functional as F
from work import Clock, accuracy, adam, arguments, loader, network, tell


def main() -> None:
    work = arguments()
    clock = Clock(work)
    model = network(work).to(work.device)
    clock.watch(model)
    trainer = create_supervised_trainer(
        model, adam(model), F.cross_entropy, work.device, output_transform=lambda x, y, logits, loss: (logits, y, loss)
    )
    logger = None
    if work.log_every:
        logger = MLflowLogger(tracking_uri=work.uri)
        logger.attach_output_handler(
            trainer,
            event_name=Events.ITERATION_COMPLETED(every=work.log_every),
            tag="train",
            output_transform=lambda out: {"loss": out[2].item(), "accuracy": accuracy(*out[:2]).item()},
            global_step_transform=global_step_from_engine(trainer, Events.ITERATION_COMPLETED),
        )
    trainer.add_event_handler(Events.STARTED, clock.begin)
    trainer.add_event_handler(Events.COMPLETED, clock.end)
    trainer.run(loader(work), max_epochs=1)
    if logger is not None:
        logger.close()
    tell(work, clock, model)


main()

"""Keras on torch: compile and fit around the network, and MLflow's callback for Keras."""

from __future__ import annotations

import os

os.environ["KERAS_BACKEND"] = "torch"
import keras
import mlflow
from keras.layers import TorchModuleWrapper
from work import LEARNING_RATE, Clock, arguments, loader, network, tell, tensors


class Timed(keras.callbacks.Callback):
    def __init__(self, clock: Clock) -> None:
        super().__init__()
        self.on_train_begin, self.on_train_end = clock.begin, clock.end


def main() -> None:
    work = arguments()
    clock = Clock(work)
    inputs, _ = tensors(work)
    callbacks = []
    if work.log_every:
        mlflow.set_tracking_uri(work.uri)
        mlflow.start_run()
        callbacks = [mlflow.keras.MlflowCallback(log_every_epoch=False, log_every_n_steps=work.log_every)]
    with keras.device("cpu" if work.device.type == "cpu" else f"gpu:{work.device.index or 0}"):
        net = network(work).to(work.device)
        model = keras.Sequential([keras.Input(inputs.shape[1:], dtype=str(inputs.dtype)[6:]), TorchModuleWrapper(net)])
        clock.watch(net)
        model.compile(
            optimizer=keras.optimizers.Adam(LEARNING_RATE),
            loss=keras.losses.SparseCategoricalCrossentropy(from_logits=True),
            metrics=["accuracy"] if work.log_every else [],
        )
        model.fit(loader(work), epochs=1, verbose=0, callbacks=[*callbacks, Timed(clock)])
    mlflow.end_run()
    tell(work, clock, net)


main()

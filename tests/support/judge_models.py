"""Plans of the models in conf/ on one simulated device, in a process of its own (tests/support/simulated.py)."""

from __future__ import annotations

import warnings

from judge import REQUEST

from runner.config.compose import composed_with, composer
from runner.plan.simulator import simulated_device
from runner.plan.worker import look

IMAGES = ["data=synthetic", "data.num_rows=64", "data.shape=[3,16,16]", "train.batch_size=16"]
SIGNALS = ["data=synthetic", "data.num_rows=64", "data.shape=[2,20]", "train.batch_size=16"]
#: a number that comes back as a number: no task for autoencoders is needed
SAME = ["data=synthetic", "data.num_rows=64", "data.num_features=1", "data.num_classes=null", "task=regression"]
CASES = {
    "cnn on signals": ["model=cnn", "model.kernel_size=5", *SIGNALS],
    "resnet18": ["model=resnet", "model.width=8", *IMAGES],
    "resnet50": ["model=resnet", "model.depth=50", "model.width=8", "model.stem=imagenet", *IMAGES],
    "vit": ["model=vit", "model.width=24", "model.depth=2", *IMAGES],
    "gru": ["model=gru", "model.hidden_size=8", "model.bidirectional=true", *SIGNALS],
    "lstm": ["model=lstm", "model.hidden_size=8", "model.num_layers=2", "model.pooling=mean", *SIGNALS],
    "frozen": ["model=resnet", "model.width=8", "model.freeze=stem", "optimizer.no_decay=norms_and_biases", *IMAGES],
    "autoencoder": ["model=autoencoder", *SAME],
    "playground": ["model=mlp", "data=playground", "data.features=[x1,sin_x2]"],
    "mnist1d": ["model=mlp", "data=mnist1d", "data.num_rows=100", "data.num_test_rows=20"],
}


def judge(_, device_name, names):
    warnings.simplefilter("ignore")
    with simulated_device(device_name, has_numbers=False) as device:
        return {name: look(composed_with(composer([]), CASES[name]), device, REQUEST) for name in names}

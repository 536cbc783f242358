"""Properties of every model: its first outputs favor no class, it learns, and it reads nothing on the way."""

import copy
import math

import pytest
import torch
from torch.nn import functional as F

from runner.inspection.host_reads import HostReads
from runner.models.autoencoder import Autoencoder
from runner.models.cnn import CNN
from runner.models.linear import Linear
from runner.models.mlp import MLP
from runner.models.recurrent import Recurrent
from runner.models.resnet import ResNet
from runner.models.vit import ViT

NUM_ROWS, NUM_CLASSES = 32, 10
IMAGE, SIGNAL = (3, 16, 16), (2, 20)
#: by name: the constructor, the shape of a row, and whether rows are tokens
CLASSIFIERS = {
    "linear": (lambda: Linear(40, NUM_CLASSES), SIGNAL),
    "mlp": (lambda: MLP(40, NUM_CLASSES, [32, 32]), SIGNAL),
    "cnn on images": (lambda: CNN(IMAGE, NUM_CLASSES, [8, 16]), IMAGE),
    "cnn on signals": (lambda: CNN(SIGNAL, NUM_CLASSES, [8, 16], kernel_size=5), SIGNAL),
    "resnet18": (lambda: ResNet(IMAGE, NUM_CLASSES, width=8), IMAGE),
    "resnet20": (lambda: ResNet(IMAGE, NUM_CLASSES, 20, width=8), IMAGE),
    "resnet50": (lambda: ResNet((1, 32, 32), NUM_CLASSES, 50, width=4, stem="imagenet"), (1, 32, 32)),
    "vit": (lambda: ViT(IMAGE, NUM_CLASSES, width=32, depth=3, num_heads=4), IMAGE),
    "gru": (lambda: Recurrent(SIGNAL, NUM_CLASSES, "gru", 16, num_layers=2, bidirectional=True), SIGNAL),
    "lstm": (lambda: Recurrent(SIGNAL, NUM_CLASSES, "lstm", 16, pooling="mean"), SIGNAL),
    "gru on tokens": (lambda: Recurrent((12,), NUM_CLASSES, "gru", 16, vocab_size=9), (12,)),
    "lstm on tokens": (lambda: Recurrent((12,), NUM_CLASSES, "lstm", 16, vocab_size=9, num_layers=2), (12,)),
}
AUTOENCODERS = {
    "autoencoder of images": (lambda: Autoencoder((2, 9, 6), 8, channels=[8, 16]), (2, 9, 6)),
    "autoencoder of signals": (lambda: Autoencoder(SIGNAL, 8, channels=[8, 16]), SIGNAL),
    "autoencoder of rows": (lambda: Autoencoder((12,), 4, hidden_sizes=[32]), (12,)),
}
MODELS = {**CLASSIFIERS, **AUTOENCODERS}


def made(name):
    torch.manual_seed(0)
    make, shape = MODELS[name]
    model = make()
    draw = torch.Generator().manual_seed(1)
    rows = torch.randn(NUM_ROWS, *shape, generator=draw)
    if "tokens" in name:
        rows = torch.randint(9, (NUM_ROWS, *shape), generator=draw)
    return model, rows, torch.randint(NUM_CLASSES, (NUM_ROWS,), generator=draw)


def loss_of(name, model, rows, classes):
    outputs = model(rows)
    return F.mse_loss(outputs, rows) if name in AUTOENCODERS else F.cross_entropy(outputs, classes)


@pytest.mark.parametrize("name", MODELS)
def test_any_number_of_rows(name):
    model, rows, _ = made(name)
    outputs = model.eval()(rows)
    assert outputs.shape == (rows.shape if name in AUTOENCODERS else (NUM_ROWS, NUM_CLASSES))
    torch.testing.assert_close(model(rows[:1]), outputs[:1], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_it_starts_with_no_opinion(name):
    model, rows, classes = made(name)
    assert loss_of(name, model, rows, classes).item() == pytest.approx(math.log(NUM_CLASSES), abs=1)


@pytest.mark.parametrize("name", AUTOENCODERS)
def test_it_starts_about_as_wrong_as_zero_would_be(name):
    model, rows, classes = made(name)
    assert loss_of(name, model, rows, classes).item() < 3 * rows.square().mean()


@pytest.mark.parametrize("name", MODELS)
def test_a_few_steps_lower_the_loss_and_read_nothing(name):
    model, rows, classes = made(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.no_grad():
        before = loss_of(name, model, rows, classes)
    with HostReads(torch.device("cpu")) as watch:
        for _ in range(15):
            optimizer.zero_grad()
            loss_of(name, model, rows, classes).backward()
            optimizer.step()
    with torch.no_grad():
        after = loss_of(name, model, rows, classes)
    assert after < 0.9 * before
    assert [str(read) for read in watch.reads] == []


@pytest.mark.parametrize("name", MODELS)
def test_gradients_reach_every_parameter(name):
    model, rows, classes = made(name)
    with torch.no_grad():  # a norm that starts at zero passes no gradient to the layers before it
        for parameter in model.parameters():
            parameter.add_(0.01)
    loss_of(name, model, rows, classes).backward()
    assert [path for path, value in model.named_parameters() if value.grad is None or not value.grad.any()] == []


@pytest.mark.parametrize("name", MODELS)
def test_the_seed_decides_the_weights(name):
    first, again = made(name)[0].state_dict(), made(name)[0].state_dict()
    assert all(torch.equal(first[path], again[path]) for path in first)
    torch.manual_seed(1)
    other = MODELS[name][0]().state_dict()
    assert name == "linear" or any(not torch.equal(first[path], other[path]) for path in first)


@pytest.mark.parametrize("name", MODELS)
def test_a_copy_computes_the_same(name):
    model, rows, _ = made(name)
    model.eval()
    assert torch.equal(copy.deepcopy(model)(rows), model(rows))

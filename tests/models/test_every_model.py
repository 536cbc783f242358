"""Properties of every model: its first outputs favor no class, it learns, and it reads nothing on the way."""

import math

import pytest
import torch
from refused import problems_of
from torch.nn import functional as F

from runner.inspection.host_reads import HostReads
from runner.models.autoencoder import Autoencoder
from runner.models.cnn import CNN
from runner.models.gpt import GPT
from runner.models.linear import Linear
from runner.models.mlp import MLP
from runner.models.recurrent import Recurrent
from runner.models.resnet import ResNet
from runner.models.transformer import Transformer
from runner.models.vit import ViT

NUM_ROWS, NUM_CLASSES = 32, 10
IMAGE, SIGNAL = (3, 16, 16), (2, 20)
#: by name: the constructor, the shape of a row, and whether rows are tokens
CLASSIFIERS = {
    "linear": (lambda: Linear(40, NUM_CLASSES), SIGNAL),
    "mlp": (lambda: MLP(40, NUM_CLASSES, [32, 32]), SIGNAL),
    "cnn on images": (lambda: CNN(IMAGE, NUM_CLASSES, [8, 16]), IMAGE),
    "cnn on signals": (lambda: CNN(SIGNAL, NUM_CLASSES, [8, 16], kernel_size=5), SIGNAL),
    "resnet20": (lambda: ResNet(IMAGE, NUM_CLASSES, 20, width=8), IMAGE),
    "resnet50": (lambda: ResNet((1, 32, 32), NUM_CLASSES, 50, width=4, stem="imagenet"), (1, 32, 32)),
    "vit": (lambda: ViT(IMAGE, NUM_CLASSES, width=32, depth=3, num_heads=4), IMAGE),
    "gru": (lambda: Recurrent(SIGNAL, NUM_CLASSES, "gru", 16, num_layers=2, bidirectional=True), SIGNAL),
    "lstm": (lambda: Recurrent(SIGNAL, NUM_CLASSES, "lstm", 16, pooling="mean"), SIGNAL),
    "gru on tokens": (lambda: Recurrent((12,), NUM_CLASSES, "gru", 16, vocab_size=9), (12,)),
    "lstm on tokens": (lambda: Recurrent((12,), NUM_CLASSES, "lstm", 16, vocab_size=9, num_layers=2), (12,)),
}
CLASSIFIERS |= {"transformer on tokens": (lambda: Transformer((12,), NUM_CLASSES, 16, 1, 2, vocab_size=9), (12,))}
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


@pytest.mark.parametrize("name", MODELS)
def test_initial_outputs_favor_none_and_follow_seed(name):
    model, rows, classes = made(name)
    loss = loss_of(name, model, rows, classes).item()
    if name in AUTOENCODERS:
        assert loss < 3 * rows.square().mean()
    else:
        assert loss == pytest.approx(math.log(NUM_CLASSES), abs=1)
    model, again = made(name)[0], made(name)[0].state_dict()
    assert all(torch.equal(again[path], value) for path, value in model.state_dict().items())


@pytest.mark.parametrize("name", MODELS)
def test_steps_lower_loss_without_device_reads(name):
    model, rows, classes = made(name)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
    with torch.no_grad():
        before = loss_of(name, model, rows, classes)

    def steps(count):
        for _ in range(count):
            optimizer.zero_grad()
            loss_of(name, model, rows, classes).backward()
            optimizer.step()

    with HostReads(torch.device("cpu")) as watch:
        steps(2)  # the first one makes the optimizer's state; watching makes steps slow
    steps(10)
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


@pytest.mark.parametrize(
    "make",
    [
        lambda: MLP(40, 3, [32], dropout=0.5),
        lambda: CNN(SIGNAL, 3, dropout=0.5),
        lambda: ViT(IMAGE, 3, width=32, depth=1, num_heads=4, dropout=0.5),
        lambda: Transformer(SIGNAL, 3, 16, 1, 2, dropout=0.5),
        lambda: Recurrent(SIGNAL, 3, "gru", 16, dropout=0.5),
    ],
)
def test_dropout_is_off_in_evaluation(make):
    model = make()
    rows = torch.randn(4, *(IMAGE if isinstance(model, ViT) else SIGNAL))
    assert not torch.equal(model(rows), model(rows))
    model.eval()
    assert torch.equal(model(rows), model(rows))


SMALL_GPT = {"vocab_size": 11, "context_length": 12, "width": 16, "depth": 2, "num_heads": 2}
SMALL = {"width": 16, "depth": 2, "num_heads": 2}
REFUSED = {
    CNN: [
        ((5,), {}),
        ((1, 2, 8, 8), {}),
        ((3, 3), {}),
        ((1, 8, 8), {"kernel_size": 4}),
        ((1, 3, 8), {}),
        ((1, 8, 8), {"channels": [2] * 4}),
        ((1, 8, 8), {"channels": 32}),
        ((1, 8, 8), {"channels": [32, -1]}),
        ((1, 8, 8), {"dropout": 2}),
    ],
    MLP: [(4, {"activation": name}) for name in ("rleu", "ReLu", "leakyrelu", "zzz", None)]
    + [(4, {"hidden_sizes": sizes}) for sizes in (256, [0])]
    + [(4, {"dropout": 1})],
    ResNet: [((5,), {}), ((2, 40), {})]
    + [((3, 8, 8), settings) for settings in ({"depth": 19}, {"depth": 2}, {"stem": "cifer"}, {"width": -1})],
    ViT: [((5,), {}), ((2, 40), {}), ((1, 28, 28), {"patch_size": 5}), ((1, 7, 7), {})]
    + [((1, 8, 8), settings) for settings in ({"num_heads": 5}, {"depth": 0})],
    Recurrent: [((5,), {}), ((3, 8, 8), {"cell": "lstm"}), ((3, 8, 8, 8), {}), ((2, 8), {"vocab_size": 9})]
    + [((2, 8), settings) for settings in ({"cell": "rnn"}, {"pooling": "max"}, {"hidden_size": 0})]
    + [((2, 8), {"num_layers": 1.5}), ((2, 8), {"dropout": 1})],
    Transformer: [((7,), SMALL), ((3, 8, 8), SMALL)]
    + [((3, 8), {**SMALL, name: value}) for name, value in (("vocab_size", 5), ("patch_size", 9), ("patch_size", 3))]
    + [((3, 8), {**SMALL, "pooling": "max"}), ((3, 8), {**SMALL, "num_heads": 5})],
    Autoencoder: [((5,), settings) for settings in ({"kind": "conv"}, {"kind": "cnn"}, {"bottleneck": 0})]
    + [((1, 8, 8), {"channels": 8}), ((5,), {"activation": "rleu"})],
}
GPT_SETTINGS = [
    {"vocab_size": None},
    {"num_heads": 3},
    {"width": 6, "positions": "rotary"},
    {"depth": 0},
    {"width": "16"},
    {"positions": "rotari"},
    {"dropout": 1},
]


@pytest.mark.parametrize("kind", REFUSED)
def test_settings_that_do_not_fit_are_refused(kind, messages):
    for shape, settings in REFUSED[kind]:
        outputs = () if kind is Autoencoder else (10,)
        messages(problems_of(kind, shape, *outputs, **settings))


def test_settings_of_a_gpt_are_refused(messages):
    for settings in GPT_SETTINGS:
        messages(problems_of(GPT, **{**SMALL_GPT, **settings}))
    messages(problems_of(GPT(**SMALL_GPT), torch.zeros(1, 13, dtype=torch.int64)))

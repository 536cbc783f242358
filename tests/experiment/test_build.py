"""Settings next to a model's arguments (initial weights, frozen parts), an optimizer's (groups) and the data's (folds, a sampler)."""

import json
import shutil
import statistics

import pytest
import torch
from hand_loop import steps_of
from members import CPU, trained_alone
from omegaconf import OmegaConf
from simulated import run_simulated
from torch.nn import functional as F

from runner import cli
from runner.config import compose
from runner.config.compose import composed_with, composer
from runner.config.instantiate import build
from runner.config.nodes import USUAL
from runner.data.builtin.scikit import digits
from runner.data.loading.order import EPOCH, SPLIT, generator, permutation
from runner.experiment.build import prepare
from runner.models.card import read_card
from runner.models.mlp import MLP
from runner.training.evaluate import evaluate

SHORT = ["device=cpu", "tracking.enabled=false", "train.num_epochs=1", "data.limit=300", "model=mlp"]
SHORT += ["model.hidden_sizes=[8]", "task.plots=false"]


def run(folder, *words):
    return cli.main([*SHORT, f"hydra.run.dir={folder}", *words])


def weights(folder, name="best"):
    return torch.load(f"{folder}/checkpoints/{name}.pt", weights_only=True)["model"]


def test_conf_says_the_same_as_the_code():
    base = OmegaConf.load(compose.CONF / "base.yaml")
    for key, usual in USUAL.items():
        assert OmegaConf.to_container(base[key]) == usual


def test_run_starts_from_weights_that_it_keeps(own_folder, capsys):
    words = [
        "model.weights=first",
        "model.freeze=hidden",
        "optimizer=sgd",
        "optimizer.groups=[{match: output, lr: 0.5}]",
    ]
    assert run("first") == 0
    assert run("second", *words, "train.num_steps=2") == 0
    assert "starts   4 of the model's 4 tensors come from first" in capsys.readouterr().out
    first, second = weights("first"), weights("second")
    assert torch.equal(first["hidden.0.weight"], second["hidden.0.weight"])
    assert not torch.equal(first["output.weight"], second["output.weight"])
    groups = torch.load("second/checkpoints/last.pt", weights_only=True)["optimizer"]["param_groups"]
    assert [(group["lr"], len(group["params"])) for group in groups] == [(0.5, 2)]
    shutil.rmtree("first")
    card = read_card(own_folder / "second")
    assert "weights" not in card.model
    build(card.model).load_state_dict(second)
    assert cli.main(["resume", "second", "train.num_steps=3"]) == 0
    assert json.loads((own_folder / "second" / "summary.json").read_text())["num_steps"] == 3
    assert run("third", "model.weights=first") == 2


SEVERAL = """
from torch import nn
class Two(nn.Module):
    def __init__(self, inputs, outputs, named=False):
        super().__init__()
        self.answer, self.other, self.named = nn.Linear(inputs, outputs), nn.Linear(inputs, 3), named
    def forward(self, x):
        found = self.answer(x), self.other(x)
        return dict(zip(("answer", "other"), found)) if self.named else found
"""


@pytest.mark.parametrize(("named", "output"), [(False, 0), (True, "answer")])
def test_named_one_of_several_outputs_is_scaled(named, output, own_folder, capsys):
    (own_folder / "two.py").write_text(SEVERAL)
    (own_folder / "conf/model").mkdir(parents=True)
    node = f"_target_: two.Two\ninputs: ${{facts.in_features}}\noutputs: ${{facts.out_features}}\nnamed: {named}\n"
    (own_folder / "conf/model/two.yaml").write_text(node)
    words = ["data=diabetes", "model=two", "task=regression", "task.plots=false", "train.num_epochs=1"]
    words += ["device=cpu", "tracking.enabled=false"]
    if named:
        assert cli.main([*words, "hydra.run.dir=none"]) == 1
        assert f"task.output={output}" in capsys.readouterr().out
    assert cli.main([*words, f"task.output={output}", "hydra.run.dir=run"]) == 0
    model = build(read_card(own_folder / "run").model)
    model.load_state_dict(weights("run"))
    inputs = torch.zeros(1, 10)
    found = model(inputs)[output]
    alone = model.model(model.before(inputs))[output]
    assert torch.equal(found, alone * model.after.spreads + model.after.means) and 100 < model.after.means.item() < 200


OWN = """
from torch import nn
class Net(nn.Module):
    def __init__(self, outputs, weights="DEFAULT", freeze=3):
        super().__init__()
        print("weights:", weights, "freeze:", freeze)
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, outputs))
    def forward(self, x):
        return self.layers(x)
"""


@pytest.mark.parametrize(
    ("words", "told"),
    [([], "weights: DEFAULT freeze: 3"), (["model.weights=V2", "model.freeze=0"], "weights: V2 freeze: 0")],
)
def test_custom_model_with_weights_argument_gets_it(words, told, own_folder, capsys):
    (own_folder / "my_net.py").write_text(OWN)
    (own_folder / "conf/model").mkdir(parents=True)
    (own_folder / "conf/model/mine.yaml").write_text("_target_: my_net.Net\noutputs: ${facts.out_features}\n")
    given = [word for word in SHORT if not word.startswith("model")]
    assert cli.main([*given, "hydra.run.dir=own", "model=mine", *words]) == 0
    assert told in capsys.readouterr().out
    assert json.loads((own_folder / "own" / "model.json").read_text())["model"].get("weights") == (
        (words and "V2") or None
    )


@pytest.mark.parametrize(
    ("word", "write"),
    [
        ("model.strict=maybe", "model.strict=true"),
        ("model.freeze=[3]", "model.freeze=[encoder]"),
        ("optimizer.groups=[{lr: 1}]", "optimizer.groups=[{match: encoder, lr: 0.0001}]"),
        ("optimizer.no_decay=norms", "optimizer.no_decay=norms_and_biases"),
        ("model.freeze=hiden", "hidden"),
        ("model.weights=nowhere.pt", "a file or a run directory"),
        ("model.wieghts=first", "model.weights"),
        (f"model.weights={'w' * 300}", "a file or a run directory"),
        (f"model._target_={'w' * 300}.Net", "add your own class to a file"),
        ("train.early_stopping.metric=val/acuracy", "train.early_stopping.metric=val/accuracy"),
    ],
)
def test_what_they_are_not(word, write, own_folder, capsys):
    assert run("wrong", word) == 2
    assert write in capsys.readouterr().err


def test_missing_fact_names_suitable_models(own_folder, capsys):
    (own_folder / "text.txt").write_text("one and two. " * 100)
    words = ["data=text", "data.path=text.txt", "data.context_length=8", "task=language", "device=cpu"]
    assert cli.main([*words, "model=mlp"]) == 2
    said = capsys.readouterr().err
    assert "this data has no `in_features`; it has input_shape=[8]" in said and "=None" not in said
    assert "help: use a model of tokens: `model=gpt`, `model=transformer`" in said


HIDDEN, ROWS, BATCH, EPOCHS = [8], 200, 50, 2
BY_HAND = ["model=mlp", f"model.hidden_sizes={HIDDEN}", f"data.limit={ROWS}", "data.test_fraction=0"]


def limited():
    """Return the rows of digits that data.limit keeps with seed 0: tests/data/test_split.py tests it."""
    from runner.data.split import take

    source, draw = digits(), generator(0, SPLIT)
    kept = take(torch.arange(len(source.labels)), ROWS, labels=source.labels, generator=draw)[0]
    return source.rows[0][kept], source.rows[1][kept], draw


def trained_by_hand(inputs, targets, orders):
    """Train in a plain loop over the orders of its epochs. Returns the model, and the loss of each step."""
    torch.manual_seed(0)
    model = MLP(64, 10, HIDDEN)
    batches = ((inputs[rows], targets[rows]) for order in orders for rows in torch.as_tensor(order).split(BATCH))
    return model, [loss for loss, _ in steps_of(model, batches)]


def losses_of(run):
    return [value for (name, _), value in sorted(run.listener.points.items()) if name == "train/loss"]


def test_cross_validation_is_a_loop_by_hand(tmp_path):
    """The rows of each class are dealt to the folds in a random order, starting at the fold after the previous class's last one."""
    inputs, targets, draw = limited()
    shuffled, dealt = torch.randperm(ROWS, generator=draw).tolist(), []
    for label in range(10):
        dealt += [row for row in shuffled if targets[row] == label]
    runs = trained_alone(tmp_path, BY_HAND, [[f"data.fold={fold}/3"] for fold in range(3)])
    found, expected = [], []
    for fold, run in enumerate(runs):
        validated = sorted(dealt[fold::3])
        rest = [row for row in range(ROWS) if row not in validated]
        orders = [permutation(len(rest), seed=0, epoch=epoch) for epoch in range(EPOCHS)]
        model, losses = trained_by_hand(inputs[rest], targets[rest], orders)
        assert losses_of(run) == losses
        with torch.no_grad():
            expected.append(float(F.cross_entropy(model(inputs[validated]), targets[validated])))
        found.append(run.listener.points["val/loss", len(losses)])
    assert found == pytest.approx(expected, rel=1e-6)
    assert statistics.fmean(found) == pytest.approx(statistics.fmean(expected), rel=1e-6)


def drawn_by_hand(targets, weights, epoch):
    """Of two numbers per row, one chooses the class, and the other one of its rows."""
    members = [[row for row, label in enumerate(targets.tolist()) if label == each] for each in range(10)]
    drawn = torch.rand(2, len(targets), dtype=torch.float64, generator=generator(0, EPOCH, epoch))
    chosen = []
    for share, place in drawn.T.tolist():
        label = next(each for each in range(10) if share < sum(weights[: each + 1]) / sum(weights))
        chosen.append(members[label][int(place * len(members[label]))])
    return chosen


@pytest.mark.parametrize(
    ("sampler", "weights", "where"),
    [("balanced", [1] * 10, "device"), ("[9,1,0,0,0,0,0,0,0,2]", [9, 1, *[0] * 7, 2], "stream")],
)
def test_resumed_sampler_run_equals_loop_by_hand(tmp_path, sampler, weights, where):
    inputs, targets, _ = limited()
    words = [*BY_HAND, "data.val_fraction=0", f"data.sampler={sampler}", f"data.residency={where}"]
    (part,) = trained_alone(tmp_path, [*words, "train.num_steps=6"], [[]])  # 4 steps per epoch
    (rest,) = trained_alone(tmp_path, words, [[]])
    orders = [drawn_by_hand(targets, weights, epoch) for epoch in range(EPOCHS)]
    assert losses_of(part) + losses_of(rest) == trained_by_hand(inputs, targets, orders)[1]


def test_targets_in_any_unit_learn_equally(own_folder):
    for name, unit in (("small", 1e-9), ("large", 1e9)):
        rows = "".join(f"{number},{unit * (number * 7 % 40)!r}\n" for number in range(40))
        (own_folder / f"{name}.csv").write_text(f"x,y\n{rows}")
        assert run(name, "data=table", f"data.path={name}.csv", "data.kind=regression", "task=regression") == 0
    small, large = weights("small"), weights("large")
    for name in ("model.hidden.0.weight", "model.output.weight"):
        torch.testing.assert_close(small[name], large[name])


def test_sampler_and_class_weights_balance_once(own_folder):
    rows = "".join(f"{number},{'rare' if number % 10 == 0 else 'often'}\n" for number in range(80))
    (own_folder / "t.csv").write_text(f"x,y\n{rows}")
    for name, more in (("drawn", []), ("both", ["task.class_weights=balanced"])):
        assert run(name, "data=table", "data.path=t.csv", "data.sampler=balanced", *more) == 0
    drawn, both = weights("drawn", "last"), weights("both", "last")
    assert all(torch.equal(drawn[name], both[name]) for name in drawn)


def evaluated(device, *words):
    """Return the size of the batches, the loss, and the printed line about the data."""
    words = ("data=synthetic", "data.num_rows=6000", "data.val_fraction=0.5", "model=mlp", f"device={device}", *words)
    parts = prepare(composed_with(composer([]), [*words]), device)
    values = evaluate(parts.model, parts.task, parts.val.epoch(0), precision=parts.precision)
    return parts.val.batch_size, parts.train.batch_size, values["loss"], parts.residency


def all_evaluated(device):
    small = ("model.hidden_sizes=[1000]", "backends.cuda.memory_fraction=0.001")  # 24 MiB
    return [evaluated(device, *words) for words in ((), ("train.deterministic=true",), small)]


def test_accelerator_evaluates_larger_batches(tmp_path):
    found = run_simulated("cuda:0", all_evaluated, cwd=tmp_path)
    assert [each[:2] for each in found] == [[2048, 128], [128, 128], [256, 128]]
    assert found[0][2] == pytest.approx(found[1][2], rel=1e-6)
    assert "evaluated in batches of 2,048 (auto: train.eval_batch_size=null)" in found[0][3]
    assert "evaluated" not in found[1][3]
    assert evaluated(CPU)[0] == 128

import pytest
import torch
from refused import problems_of
from safetensors.torch import save_file
from torch import nn

from runner.models.weights import load_weights


def net(width=4):
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 2))


def state(model=None):
    torch.manual_seed(1)
    return (model or net()).state_dict()


FILES = {
    "w.safetensors": lambda values, path: save_file(values, path),
    "w.pt": lambda values, path: torch.save(values, path),
    "w.pth": lambda values, path: torch.save({"epoch": 3, "state_dict": values}, path),
    "ddp.pt": lambda values, path: torch.save({f"module.{name}": value for name, value in values.items()}, path),
    "compiled.pt": lambda values, path: torch.save(
        {f"_orig_mod.{name}": value for name, value in values.items()}, path
    ),
    "both.pt": lambda values, path: torch.save(
        {f"module._orig_mod.{name}": value for name, value in values.items()}, path
    ),
}


@pytest.mark.parametrize("name", FILES)
def test_each_kind_of_file(name, tmp_path):
    values = state()
    FILES[name](values, tmp_path / name)
    model = net()
    told = load_weights(model, str(tmp_path / name), strict=True)
    assert all(torch.equal(value, values[path]) for path, value in model.state_dict().items())
    assert told == f"9 of the model's 9 tensors come from {tmp_path / name}"


def test_a_run_s_folder_gives_its_best(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    values = state()
    inner = {f"model.{name}": value for name, value in values.items()}
    around = {"before.mean": torch.zeros(3), "after.scale": torch.ones(2)}  # layers for that run's data
    torch.save({"model": inner | around, "step": 7, "value": 0.5}, tmp_path / "checkpoints" / "best.pt")
    model = net()
    load_weights(model, str(tmp_path), strict=True)
    assert torch.equal(model[0].weight, values["0.weight"])


def test_model_with_prefixed_names_keeps_them(tmp_path):
    class Holder(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = net()

    values = state(Holder())
    torch.save(values, tmp_path / "w.pt")
    holder = Holder()
    load_weights(holder, str(tmp_path / "w.pt"), strict=True)
    assert torch.equal(holder.model[0].weight, values["model.0.weight"])


def test_strict_loading_lists_all_problems(tmp_path, messages):
    values = state(net(5))
    values["head.wieght"] = values.pop("2.weight")
    torch.save(values, tmp_path / "w.pt")
    model = nn.Sequential()
    for name, layer in zip(("0", "1", "head"), net(), strict=True):
        model.add_module(name, layer)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    messages(problems_of(load_weights, model, str(tmp_path / "w.pt"), strict=True))
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_loading_without_strict_takes_what_fits(tmp_path):
    values = state(nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 9)))
    torch.save(values, tmp_path / "w.pt")
    model = net()
    head = model[2].weight.clone()
    told = load_weights(model, str(tmp_path / "w.pt"), strict=False)
    assert told.startswith("7 of the model's 9 tensors")
    assert "of another shape: 2.weight (9x4 in the file, 2x4 in the model), 2.bias" in told
    assert torch.equal(model[0].weight, values["0.weight"])
    assert torch.equal(model[2].weight, head)


def test_older_files_know_no_count_of_batches(tmp_path):
    values = state()
    del values["1.num_batches_tracked"]
    torch.save(values, tmp_path / "w.pt")
    assert load_weights(net(), str(tmp_path / "w.pt"), strict=True).startswith("8 of")


class Evil:
    def __reduce__(self):
        return (print, ("code ran",))


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("w.pt", {"a": Evil()}),
        ("w.pt", net()),
        ("w.pt", b"not a file of torch's"),
        ("w.safetensors", b"no header"),
        ("w.pt", [1, 2]),
        ("w.pt", {"other": torch.zeros(2)}),
    ],
)
def test_invalid_weight_files_are_refused(name, content, tmp_path, capsys, messages):
    if isinstance(content, bytes):
        (tmp_path / name).write_bytes(content)
    else:
        torch.save(content, tmp_path / name)
    messages(problems_of(load_weights, net(), str(tmp_path / name), strict=False))
    assert "code ran" not in capsys.readouterr().out


@pytest.mark.parametrize("name", ["x" * 300 + "/a.pt", "a\0b/c.pt"], ids=["too long", "with a zero"])
def test_file_in_impossible_directory_is_refused(name):
    assert problems_of(load_weights, net(), name, strict=True)[0].code == "missing-file"


def test_a_file_that_is_not_there(tmp_path, messages):
    torch.save(state(), tmp_path / "weights.pt")
    (problem,) = messages(problems_of(load_weights, net(), str(tmp_path / "wieghts.pt"), strict=True))
    assert problem.suggestions == (f"model.weights={tmp_path / 'weights.pt'}",)
    messages(problems_of(load_weights, net(), str(tmp_path), strict=True))

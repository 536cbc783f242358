"""A group's settings for its target are removed if the command line names another target; all others remain."""

import pytest
from omegaconf import OmegaConf
from refused import problems_in

from runner import cli
from runner.config import compose
from runner.config.identity import chosen

LINEAR = "model._target_=torch.nn.Linear"
LINE = f"{LINEAR}: it takes no input_shape, channels, kernel_size, dropout, left out of model=cnn\n"


@pytest.fixture
def model(own_folder):
    def of(*words, completes=False):
        composed = compose.composer([], loader=compose.CheckedLoader(completes=completes))
        composed(list(words))
        cfg = composed(list(words))
        return {key for key in cfg.model if key not in ("_target_", "weights", "strict", "freeze", "lora", "head_only")}

    return of


def test_arguments_unknown_to_new_target_are_dropped(model, capsys):
    assert model(LINEAR) == {"out_features"}
    assert capsys.readouterr().err == ""
    assert model("model=cnn", LINEAR) == {"out_features"}
    assert capsys.readouterr().err == LINE
    assert (
        model()
        == model(LINEAR, completes=True)
        == {"input_shape", "out_features", "channels", "kernel_size", "dropout"}
    )
    assert capsys.readouterr().err == ""


def test_set_arguments_are_kept_and_reported(model, own_folder):
    (own_folder / "conf/experiment").mkdir(parents=True)
    (own_folder / "conf/experiment/mine.yaml").write_text("# @package _global_\nmodel: {kernel_size: 5}\n")
    kept = model(LINEAR, "model.dropout=0.0", "+model.width=1", "experiment=mine")
    assert kept == {"out_features", "dropout", "width", "kernel_size"}


def test_target_with_any_arguments_loses_none(model, own_folder):
    (own_folder / "my_other_nets.py").write_text("def net(**sizes): ...\n")
    for target in ("my_other_nets.net", "my_other_nets.gone", "os.system"):
        assert model(f"model._target_={target}") == model()


def test_target_without_arguments_loses_all(model, own_folder):
    (own_folder / "my_plain_nets.py").write_text("def net(): ...\n")
    assert model("model._target_=my_plain_nets.net") == set()


def test_only_missing_arguments_are_reported(own_folder, capfd):
    (own_folder / "my_own_nets.py").write_text(
        "from torch import nn\n\n\nclass Net(nn.Linear):\n    def __init__(self, inputs, outputs): ...\n"
    )
    for more, codes in (([], ["missing-value"] * 2), (["+model.width=1"], ["bad-argument", *["missing-value"] * 2])):
        assert cli.main(["model._target_=my_own_nets.Net", *more, "tracking.enabled=false", "--json"]) == 2
        assert [problem.code for problem in problems_in(capfd.readouterr().out)] == codes


def test_old_arguments_without_effect_are_dropped():
    old = ["data=huggingface", "data.path=set", "+data.streaming=false", "+data.num_rows=null", "+data.data_dir=null"]
    cfg, now = compose.composer([])(old), compose.composer([])(old[:2])
    assert chosen(cfg) == chosen(now) and cfg.data == now.data
    assert chosen(OmegaConf.create({"data": {**now.data, "streaming": False}})) == {
        key: value for key, value in chosen(now).items() if key.startswith("data.")
    }
    assert "data.streaming" in chosen(compose.composer([])([*old[:2], "+data.streaming=true"]))

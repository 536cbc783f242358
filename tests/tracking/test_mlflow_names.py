import pytest

from runner.tracking.mlflow_names import MAX_NAME, Names, cut, valid_model_name, valid_name, valid_names

NAMES = [
    ("train/loss", "train/loss"),
    ("optimizer.lr", "optimizer.lr"),
    ("cuda:0", "cuda:0"),
    ("a b-c_d.e", "a b-c_d.e"),
    ("größe", "größe"),
    ("model.layers[0].size", "model.layers.0.size"),
    ("grid[1][2]", "grid.1.2"),
    ("acc@5", "acc_5"),
    ("lr=0.1,x#y%z", "lr_0.1_x_y_z"),
    ("a[b]", "a_b_"),
    ("/a//b/", "a/b"),
    ("./a", "_/a"),
    ("a/../b", "a/__/b"),
    ("..a", "__a"),
    ("..", "__"),
    ("", "_"),
    ("a\nb", "a_b"),
]


@pytest.mark.parametrize(
    ("name", "spelled"),
    [("cnn-digits", "cnn-digits"), ("net-my data/a.csv", "net-my-data-a-csv"), ("größe", "größe"), ("'%:", "model")],
)
def test_model_name_can_be_typed_in_uri(name, spelled):
    from mlflow.utils.validation import _validate_logged_model_name

    assert valid_model_name(name) == spelled and len(valid_model_name(name * 100)) <= MAX_NAME
    _validate_logged_model_name(spelled)


@pytest.mark.parametrize(("name", "spelled"), NAMES)
def test_names_are_valid_in_mlflow(name, spelled):
    assert valid_name(name) == spelled


@pytest.mark.parametrize("name", [*[name for name, _ in NAMES], "x" * 1000, "/".join(".." for _ in range(200))])
def test_mlflow_accepts_the_names(name):
    from mlflow.utils.validation import _validate_metric_name, _validate_param_name, _validate_tag_name

    for validate in (_validate_metric_name, _validate_param_name, _validate_tag_name):
        validate(valid_name(name))
    assert 0 < len(valid_name(name)) <= MAX_NAME


def test_long_names_stay_distinct():
    assert valid_name("x" * 300 + "a") != valid_name("x" * 300 + "b")


def test_equal_names_stay_distinct():
    spelled = valid_names({"a@b": 1, "a#b": 2, "a_b": 3}, most=10)
    assert len(spelled) == 3 and sorted(spelled.values()) == ["1", "2", "3"] and spelled["a_b"] == "1"


def test_first_of_equal_names_is_unchanged():
    names = Names(["p>0.5", "b", "a[0]"])
    assert [names.key(name) for name in ("b", "a[0]", "p>0.5")] == ["b", "a.0", "p_0.5"]
    later = names.key("p<0.5")
    assert later.startswith("p_0.5_") and names.key("p<0.5") == later and names.key("p>0.5") == "p_0.5"
    assert Names(["p>0.5", "p<0.5", "c"]).key("p<0.5") == later != Names(["p<0.5", "p>0.5"]).key("p<0.5")


def test_long_values_are_cut_with_a_note():
    assert cut("x" * 10, most=10) == "x" * 10
    assert cut("x" * 7000, most=6000).endswith("... (7000 characters)")
    assert len(cut("x" * 7000, most=6000)) == 6000
    assert valid_names({"a": None, "b": [1]}, most=10) == {"a": "None", "b": "[1]"}

import pytest
import torch
from refused import problems_of

from runner.config.instantiate import build
from runner.data.builtin.scikit import SETS, digits, scikit
from runner.data.split import split


@pytest.mark.parametrize("name", sorted(SETS))
def test_values_and_names_equal_scikit_learns(name):
    import sklearn.datasets

    settings = {"scaled": False} if name == "diabetes" else {}
    expected = getattr(sklearn.datasets, f"load_{name}")(**settings)
    source = scikit(name)
    assert torch.equal(source.rows[0], torch.from_numpy(expected.data).float())
    assert torch.equal(source.rows[1].flatten().double(), torch.from_numpy(expected.target).double())
    assert [column["name"] for column in source.reader["columns"]] == [str(name) for name in expected.feature_names]
    assert list(source.classes) == [str(name) for name in getattr(expected, "target_names", [])]
    assert source.facts["in_features"] == expected.data.shape[1]


def test_layers_are_fitted_on_the_training_split():
    source = scikit("diabetes")
    train = split(source, val_fraction=0.1, test_fraction=0.2, limit=None, seed=0).train
    around = source.around(train)
    before, after = build(around.before, key="before"), build(around.after, key="after")
    scaled = before(train[0])
    assert scaled.mean(0).abs().max() < 1e-4
    assert torch.allclose(scaled.std(0, correction=0), torch.ones(10), atol=1e-4)
    assert before(source.rows[0]).mean(0).abs().max() > 1e-3
    targets = (train[1] - after.means) / after.spreads
    assert targets.std(correction=0).item() == pytest.approx(1, abs=1e-4)


def test_classes_are_not_scaled():
    source = scikit("iris")
    assert source.around(source.rows).after is None


def test_a_row_from_a_file(tmp_path):
    source = scikit("wine")
    names = [column["name"] for column in source.reader["columns"]]
    file = tmp_path / "mine.csv"
    file.write_text(",".join(reversed(names)) + "\n" + ",".join(map(str, range(13))) + "\n")
    assert build(source.reader, key="reader")(str(file)).tolist() == [[12.0 - index for index in range(13)]]


def test_another_name(messages):
    (problem,) = messages(problems_of(scikit, "wines"))
    assert problem.suggestions == ("data.which=wine",)


def test_the_digits_are_images_and_ten_classes():
    source = digits()
    images, targets = source.rows
    assert images.shape == (1797, 1, 8, 8)
    assert images.dtype == torch.float32
    assert (images.min().item(), images.max().item()) == (0, 1)
    assert targets.bincount().tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]
    assert source.facts == {"input_shape": [1, 8, 8], "in_features": 64, "num_classes": 10, "out_features": 10}
    assert source.classes == tuple("0123456789")
    assert (source.name, source.origin) == ("digits", "scikit-learn load_digits")

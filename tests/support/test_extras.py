"""CI has all packages of `.[test]`; otherwise a test without its package would be skipped silently."""

import importlib.util
import os

import pytest

NEEDED = ("cmaes", "datasets", "hydra_plugins.hydra_submitit_launcher", "hypothesis", "onnx", "onnxruntime", "onnxscript",
          "optuna", "ray", "safetensors", "submitit", "tokenizers", "torchmetrics", "transformers")  # fmt: skip


@pytest.mark.skipif(os.environ.get("CI") != "true", reason="a person may leave some out")
@pytest.mark.parametrize("name", NEEDED)
def test_what_tests_need_is_there(name):
    assert importlib.util.find_spec(name) is not None, 'pip install -e ".[test]"'

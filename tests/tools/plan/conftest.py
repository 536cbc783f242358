"""Directories of a user's models, for plans."""

import shutil
from pathlib import Path

import pytest

SUPPORT = Path(__file__).resolve().parents[2] / "support"
JUDGED = {
    "model": "_target_: judged.model\nname: ???\n",
    "task": "_target_: judged.task\nname: ???\n",
    "data": "_target_: judged.data\ncase: ???\n",
}
NETWORKS = {"resnet": "ResNet", "transformer": "Transformer", "lstm": "Lstm", "own": "Own"}


@pytest.fixture(scope="session")
def own_models(tmp_path_factory):
    """A directory with conf/ and modules, like a user's."""
    folder = tmp_path_factory.mktemp("own")
    for group, text in JUDGED.items():
        (folder / "conf" / group).mkdir(parents=True)
        (folder / "conf" / group / "judged.yaml").write_text(text)
    for name, kind in NETWORKS.items():
        size = "" if name == "resnet" else "size: 16\n"
        text = f"_target_: networks.{kind}\noutputs: ${{facts.out_features}}\n{size}"
        (folder / f"conf/model/{name}.yaml").write_text(text)
    for file in ("judged.py", "networks.py"):
        shutil.copy(SUPPORT / file, folder)
    return folder

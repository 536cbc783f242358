"""conf/schema.json accepts every file of conf/, and finds the errors in a user's."""

import json
import re
from pathlib import Path

import jsonschema
import pytest
from omegaconf import OmegaConf

from runner import cli
from runner.config import compose, json_schema
from runner.config.schema import SHARED, Config, SearchKeys, fits, keys, subgroups

LINE = re.compile(r"^# yaml-language-server: \$schema=(\S+)$", re.MULTILINE)
COMMITTED = json.loads((compose.CONF / json_schema.FILE).read_text())
FILES = sorted(str(path.relative_to(compose.CONF)) for path in compose.CONF.rglob("*.yaml"))
CNN = "_target_: runner.models.CNN\ninput_shape: ${facts.input_shape}\nout_features: ${facts.out_features}\n"
SEARCH = "_target_: runner.sweep.Search\n"
#: by the group of a file: its content, and the error
WRONG = [
    ("experiment", "train: {num_epoch: 5}", "num_epoch"),
    ("experiment", "train: {num_epochs: ten}", "ten"),
    ("experiment", "train: {num_epochs: 0}", "minimum of 1"),
    ("experiment", "train: {precision: fp23}", "fp23"),
    ("experiment", "train: {early_stopping: {patienc: 3}}", "patienc"),
    ("experiment", "seeed: 3", "seeed"),
    ("experiment", "seed: -1", "minimum of 0"),
    ("experiment", "device: 0", "0 is not of type"),
    ("experiment", "data: {val_fraction: 1.5}", "1.5"),
    ("experiment", "data: {residency: gpu}", "gpu"),
    ("experiment", "placement: {guard: sometimes}", "sometimes"),
    ("experiment", "backends: {cuda: {memory_fraction: 2}}", "maximum of 1"),
    ("experiment", "backends: {cpu: {num_thread: 2}}", "num_thread"),
    ("experiment", "sweep: {batch: 0}", "0 is not valid"),
    ("experiment", "sweep: {slots: {gpu: 1}}", "gpu"),
    ("experiment", "tracking: {points: 50}", "50 is not valid"),
    ("experiment", "tracking: {log_model: some}", "some"),
    *(
        ("experiment", f"tracking: {{tags: {tags}}}", "is not valid")
        for tags in ("team", "{mlflow.user: ann}", "{device: mine}", "[sweep]", "{a: null}", "['a//b']", "['a=b']")
    ),
    ("experiment", "optimizer: {no_decay: biases}", "biases"),
    ("experiment", "optimizer: {groups: [{lr: 0.1}]}", "'match' is a required"),
    ("experiment", "optimizer: {turns: {critic: {every: 2}}}", "'params' is a required"),
    ("experiment", "optimizer: {turns: {critic: {params: critic, every: 0}}}", "minimum of 1"),
    ("experiment", "optimizer: {turns: [critic]}", "critic"),
    ("experiment", "train: {hooks: [{_target_: my.norms, at: epcoh}]}", "epcoh"),
    ("experiment", "metrics: {every: 1.5}", "1.5"),
    ("experiment", "facts: {num_clases: 3}", "num_clases"),
    ("experiment", "model: {_target_: runner.models.MPL}", "runner.models.MPL"),
    ("experiment", "hydra: {sweeper: {_target_: runner.sweep.Search, n_trails: 5}}", "n_trails"),
    ("model", f"{CNN}freeze: 3", "3 is not of type"),
    ("optimizer", "_target_: torch.optim.SGD\nlr: 0.1\n_partial_: 3", "3 is not of type"),
    ("data", "_target_: runner.data.tabel\npath: x.csv", "runner.data.tabel"),
    ("data", "limit: 0", "minimum of 1"),
    ("train", "num_epochs: 3\nclip_grad_nrm: 1", "clip_grad_nrm"),
    ("tracking", "enabled: maybe", "maybe"),
    ("hydra/sweeper", f"{SEARCH}sampler: bayes", "bayes"),
    ("hydra/sweeper", f"{SEARCH}direction: [up]", "is not valid"),
]
RIGHT = [
    ("experiment", "device: [cuda:1, cpu]\nname: 2026\noptimizer: {lr: 1e-3}\nmodel: {freeze: [stem], weights: last, deep: 3}"),
    ("experiment", "train:\n  num_epochs: ${oc.env:N}\n  precision: ${oc.env:P,fp32}\n  batch_size: ???\n  compile: ${x}"),
    ("experiment", "defaults: [override /model: net, override hydra/launcher: ray, /db@model: x, _self_]\nmodel: {blocks: 3}"),
    ("experiment", "defaults: [override /model: mlp]\nmodel: {_target_: my.Net, blocks: 3}\nhydra: {job: {name: x}}"),
    ("experiment", "optimizer:\n  groups: [{match: b.*, lr: 0.1}]\nsweep: {batch: 4, zip: {a: [1]}, until: decided}"),
    ("experiment", "train: {hooks: [my.a, {_target_: my.b, at: end}, {_target_: my.c, at: [start, epoch], by: 3}]}"),
    ("experiment", "optimizer: {turns: {a: {params: [a, b.*], lr: 0.1, every: 3}, b: {params: c, _target_: torch.optim.SGD}}}"),
    ("model", "_target_: my_models.Net\ninputs: ${facts.in_features}\nanything: [1]"),
    ("model", "_target_: my_models.Net\nweights: 3\nfreeze: 2"),
    ("model", "_target_: ???"),
    ("model", "_target_: ${oc.env:NET}\nwidth: 3"),
    ("model", "defaults: [mlp, _self_]\nhidden_sizes: [3]"),
    ("scheduler", "_target_: torch.optim.swa_utils.SWALR\n_partial_: true\nswa_lr: 0.1"),
    ("task", "_target_: runner.tasks.Regression\nmetrics: {r2: {_target_: torchmetrics.regression.R2Score}}\nplots: [samples]"),
    ("data", "_target_: runner.data.table\npath: [a.csv, b.csv]\nin_memory: false\nlimit: 10"),
    ("data", "_target_: my_parts.quadrants\nnum_rows: 3\nval_fraction: 0.2"),
    ("hydra/launcher", "_target_: runner.sweep.RayCluster\nnum_cpus: 2"),
    ("train", "defaults: [default]\nnum_epochs: 3"),
    ("tracking", "points: all\nexperiment: null"),
    ("hydra/sweeper", f"{SEARCH}direction: [minimize, maximize]\nmetric: [a, b]"),
]  # fmt: skip
VALUES = [-1, 0, 0.1, 0.5, 1, 1.5, 2, 50, 99, 100, 2**31, 2**63, "auto", "off", "all", "many", True, False, [], ["a"], ["minimize"], {}, {"a": [1]}, [{"match": "a"}], [{"lr": 1}]]  # fmt: skip


def problems(group, text, whole=COMMITTED):
    """Return the errors of a text in the schema's part for files of the group."""
    part = json_schema.line_for(group, Path("conf/schema.json"), Path("conf")).partition("=")[2].partition("#")[2]
    found = whole if not part else {"$ref": f"#{part}", "definitions": whole["definitions"]}
    errors = jsonschema.Draft7Validator(found).iter_errors(OmegaConf.to_container(OmegaConf.create(text)))
    return [error.message for error in errors]


def test_it_is_a_schema():
    jsonschema.Draft7Validator.check_schema(COMMITTED)
    assert all("allOf" in COMMITTED["definitions"][name] for name in ("train", "tracking", "model", "hydra.sweeper"))


@pytest.mark.parametrize("file", FILES)
def test_conf_files_name_schema_and_are_valid(file):
    path = compose.CONF / file
    group, head = Path(file).parent.as_posix().removeprefix("."), re.match(r"(?:#.*\n)+", path.read_text())[0]
    # an editor looks for the line before the first key
    named, _, part = LINE.search(head)[1].partition("#/definitions/")
    assert (path.parent / named).resolve() == compose.CONF / json_schema.FILE
    assert part == ("" if group in ("", "experiment") else group.replace("/", "."))
    assert problems(group, path.read_text()) == []


def test_what_a_run_leaves_is_right():
    cfg = compose.composer([])(["model=mlp", "scheduler=cosine", "task=regression"])
    assert problems("", OmegaConf.to_yaml(cfg)) == []


@pytest.mark.parametrize(("group", "text", "told"), WRONG)
def test_what_is_wrong_is_found(group, text, told):
    assert any(told in each for each in problems(group, text))


@pytest.mark.parametrize(("group", "text"), RIGHT)
def test_schema_accepts_valid_and_custom_parts(group, text):
    assert problems(group, text) == []


def keys_of(kind, part, key=""):
    """Yield every dotted key of a schema with its schema for editors."""
    for name in (*keys(kind), *subgroups(kind)):
        found = part["properties"][name]
        found = COMMITTED["definitions"][found["$ref"].removeprefix("#/definitions/")] if "$ref" in found else found
        yield f"{key}{name}", found
        if name in subgroups(kind):
            yield from keys_of(subgroups(kind)[name], found, f"{key}{name}.")


def test_schema_keys_have_their_comments():
    parts = COMMITTED["definitions"]
    told = dict(keys_of(Config, parts["config"]))
    for group, kind in SHARED.items():
        told |= keys_of(kind, parts[group]["allOf"][0]["then"], f"{group}.")
    # these two are files
    assert {key for key, part in told.items() if not part.get("description")} == {"train", "tracking"}
    for file in ("base", "train/default", "tracking/default"):
        package = file.rpartition("/")[0]
        for line in (compose.CONF / f"{file}.yaml").read_text().partition("hydra:\n")[0].splitlines():
            if match := re.match(r"( *)(\w+): .* # (.+)", line):
                name = f"{package}.{match[2]}".lstrip(".")
                named = [
                    part for key, part in told.items() if key == name or (match[1] and key.endswith(f".{match[2]}"))
                ]
                assert any(match[3] in part["description"] for part in named), line


def every_key(schema):
    """Yield the keys of a schema and of the groups below it."""
    yield from keys(schema).values()
    for inner in subgroups(schema).values():
        yield from every_key(inner)


@pytest.mark.parametrize("schema", [Config, SearchKeys, *SHARED.values()])
def test_rules_mean_what_json_schema_says(schema):
    for key in every_key(schema):
        for value in VALUES if key.valid else ():
            is_typed = (
                key.kind == "Any" or type(value).__name__ in key.kind or (type(value) is int and "float" in key.kind)
            )
            if is_typed and (key.name != "log_model" or type(value) is not int):  # Python treats 0 as false
                expected = jsonschema.Draft7Validator(key.rule).is_valid(value)
                assert fits(value, key.rule) is expected, f"{key.name}={value!r}"


def test_schema_describes_custom_options(own_folder, capsys):
    for name, text in {
        "conf/model/net.yaml": "_target_: my_parts.Net\nwidth: 3   # of a layer\nway: in\n",
        "conf/model/circle.yaml": "defaults: [circle, round]\n",
        "conf/model/round.yaml": "defaults: [circle]\n",
        "conf/hydra/launcher/odd.yaml": "_target_: runner.sweep.Odd\n",
        "conf/task/broken.yaml": "a: [\n",
        "conf/data/odd.yaml": "names: {0: {a: 1}}\non: {b: {c: 1}}\n? [1, 2]\n: {d: 1}\n",
        "conf/model/merged.yaml": "base: &base {_target_: my_parts.Net, width: 3}\n<<: *base\nrate: 0.5   # of all\n",
        "conf/task/twice.yaml": "a: 1\na: 2\n",
    }.items():
        (own_folder / name).parent.mkdir(parents=True, exist_ok=True)
        (own_folder / name).write_text(text)
    assert cli.main(["schema"]) == 0
    said = capsys.readouterr().out
    assert "conf/model/" in said and "# yaml-language-server: $schema=../schema.json#/definitions/model" in said
    assert "# yaml-language-server: $schema=../../schema.json#/definitions/hydra.launcher" in said
    whole = json.loads((own_folder / "conf/schema.json").read_text())
    assert problems("model", "defaults: [net]\nwidth: 3", whole) == []
    assert problems("model", "strict: 3", whole)
    assert {"net", "round", "mlp"} <= set(whole["definitions"]["option.model"]["anyOf"][0]["enum"])


def test_where_it_is_written(own_folder, capsys):
    (own_folder / "editor").mkdir()
    assert cli.main(["schema", "--output", "editor/runner.json", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["output"] == "editor/runner.json"
    assert told["lines"]["model"] == "# yaml-language-server: $schema=../../editor/runner.json#/definitions/model"
    assert told["lines"]["experiment"] == "# yaml-language-server: $schema=../../editor/runner.json"
    assert (own_folder / "editor/runner.json").is_file() and not (own_folder / "conf").exists()

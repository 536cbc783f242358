import json
import subprocess
import sys
from types import ModuleType

import pytest
import torch
from torch import nn

from runner.data.tables.encoder import Column, Columns, TableTarget, reader_node
from runner.models.example import call_of
from runner.tracking import mlflow_model, mlflow_store
from runner.tracking.ack import Ack, read_ack, write_ack
from runner.tracking.journal import Journal
from runner.tracking.mlflow_events import LeftOutError
from runner.tracking.uploader import Uploader

pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning:(torch|mlflow|pydantic|copyreg).*"),
    pytest.mark.filterwarnings("ignore::FutureWarning:(torch|mlflow).*"),
]


class Convolutions(nn.Module):
    def __init__(self):
        super().__init__()
        self.convolution, self.norm, self.dropout = nn.Conv2d(1, 4, 3, padding=1), nn.BatchNorm2d(4), nn.Dropout(0.5)
        self.head = nn.Linear(4 * 64, 10)

    def forward(self, images):  # (B, 1, 8, 8)
        return self.head(self.dropout(self.norm(self.convolution(images)).relu()).flatten(1))


def mlp():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 16), nn.ReLU(), nn.BatchNorm1d(16), nn.Linear(16, 10))


class Branching(nn.Module):
    """Has no graph: its forward pass depends on values."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, images):
        rows = images.flatten(1)
        return self.head(rows if float(rows.sum()) > 0 else -rows)


class OfColumns(nn.Linear):
    def __init__(self):
        super().__init__(2, 3)

    def forward(self, rows):
        return super().forward(rows.nan_to_num(7))


class OfColumnsBranching(OfColumns):
    def forward(self, rows):
        return super().forward(rows) * (2 if float(rows[0, 0]) > 0 else 1)


class OfPairs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, inputs, pair, *, scale=None):
        return self.head(inputs + pair[0] * scale), pair


class TwoInputs(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(8, 2)

    def forward(self, inputs):
        return self.head(inputs["a"] + inputs["b"])


@pytest.fixture(autouse=True)
def tracking_uri(uri, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)


@pytest.fixture
def publish(folder, journal, write, uri):
    """Write the module's weights and an example without a training, and send them. Returns the ack."""

    def send(make, example, *, build=None, **more):
        torch.manual_seed(0)
        module = make()
        with torch.no_grad():
            for tensor in module.state_dict().values():
                if tensor.is_floating_point():
                    # different models, and running statistics that differ from their defaults
                    tensor.uniform_(0.1, 1.0)
        (folder / "checkpoints").mkdir(exist_ok=True)
        torch.save({"model": module.state_dict(), "step": more.get("step", 1)}, folder / "checkpoints" / "best.pt")
        torch.save(example, folder / "journal" / "example.pt")
        write.start(journal)
        node = {"_target_": "fake"}
        journal.event("model", node=node, weights="checkpoints/best.pt", example="journal/example.pt", **more)
        write.end(journal)
        uploader = Uploader(folder, uri, build=build or (lambda node: make()))
        assert uploader.attempt(postponed=True), uploader.ack
        return uploader.ack, module.eval()

    return send


def stored(client, run_id):
    (found,) = client.search_logged_models([client.get_run(run_id).info.experiment_id])
    return found


#: runs one piece of code after the other, each in a fork
ELSEWHERE = """
import json, os, sys, traceback
import mlflow, mlflow.pytorch, mlflow.pyfunc, torch, torch._dynamo, torch._export.serde.serialize, torch.export.passes
assert "runner" not in sys.modules
for line in sys.stdin:
    pid = os.fork()
    if not pid:
        code, folder, sys.argv = json.loads(line)
        os.chdir(folder)
        said = ""
        try:
            exec(code)
            assert "runner" not in sys.modules and "tests" not in sys.modules
        except BaseException:
            said = traceback.format_exc()
        print(json.dumps(said), flush=True)
        os._exit(0)
    if status := os.waitpid(pid, 0)[1]:
        print(json.dumps(f"it ended with {status}"), flush=True)
"""


@pytest.fixture(scope="module")
def elsewhere():
    """A process with MLflow and without this package, for the whole module: runs code in a directory, as a user would."""
    command = [sys.executable, "-W", "ignore", "-c", ELSEWHERE]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def run(code, folder, *words):
        process.stdin.write(json.dumps([code, str(folder), ["", *words]]) + "\n")
        process.stdin.flush()
        assert json.loads(process.stdout.readline()) == ""

    yield run
    process.communicate()


LOAD = """
mlflow.set_tracking_uri(sys.argv[1])
model = mlflow.pytorch.load_model(f"runs:/{sys.argv[2]}/model")
rows = torch.load("rows.pt")
with torch.no_grad():
    torch.save([model(rows[:count]) for count in (1, 2, 7)], "outputs.pt")
predicted = mlflow.pyfunc.load_model(f"runs:/{sys.argv[2]}/model").predict(rows.numpy())
assert predicted.shape == (7, 10)
# meta tensors can't be combined with tensors on another device, like a GPU's
assert model.to("meta")(rows.to("meta")).shape == (7, 10)
"""


def test_model_loads_without_this_package(publish, client, uri, tmp_path, elsewhere):
    import mlflow

    rows = torch.rand(7, 1, 8, 8)
    ack, module = publish(Convolutions, rows[:1])
    assert ack.is_complete and ack.warnings == ()
    torch.save(rows, tmp_path / "rows.pt")
    elsewhere(LOAD, tmp_path, uri, ack.run_id)
    with torch.no_grad():
        expected = [module(rows[:count]) for count in (1, 2, 7)]
    for outputs, wanted in zip(torch.load(tmp_path / "outputs.pt"), expected, strict=True):
        torch.testing.assert_close(outputs, wanted)
    entry = stored(client, ack.run_id)
    assert entry.name == "model" and entry.status == "READY" and entry.source_run_id == ack.run_id
    assert [output.model_id for output in client.get_run(ack.run_id).outputs.model_outputs] == [entry.model_id]
    path = mlflow.artifacts.download_artifacts(f"runs:/{ack.run_id}/model", dst_path=str(tmp_path / "got"))
    card = mlflow.models.Model.load(path)
    assert card.signature.inputs.inputs[0].shape == (-1, 1, 8, 8) and card.signature.outputs.inputs[0].shape == (-1, 10)
    assert (card.run_id, card.model_id) == (ack.run_id, entry.model_id) and card.saved_input_example_info
    files = {file.name for file in (tmp_path / "got").rglob("*")}
    assert {"model.pt2", "requirements.txt"} <= files and "model.pth" not in files
    assert f"torch=={torch.__version__.split('+')[0]}" in next((tmp_path / "got").rglob("requirements.txt")).read_text()


def test_model_without_graph_is_pickled(publish):
    import mlflow

    ack, module = publish(Branching, torch.rand(4, 1, 8, 8))
    assert ack.is_complete and ack.warnings == ()
    loaded = mlflow.pytorch.load_model(f"runs:/{ack.run_id}/model")
    assert type(loaded).__name__ == "Branching"
    rows = torch.rand(3, 1, 8, 8)
    torch.testing.assert_close(loaded(rows), module(rows))


@pytest.mark.parametrize("make", [OfColumns, OfColumnsBranching])
def test_table_model_takes_a_dataframe(make, publish, folder):
    import mlflow
    import pandas

    columns = Columns((Column("age", "number", has_missing=True), Column("city", "category", ("Rome", "${Oslo}"))))
    card = {"reader": reader_node(columns, TableTarget(("y",), "regression"))}
    (folder / "model.json").write_text(json.dumps(card))
    rows = torch.tensor([[5.1, 0], [float("nan"), 1], [3, -1], [4, 0]])
    ack, module = publish(make, rows, card="model.json")
    assert ack.is_complete and ack.warnings == ()
    model = mlflow.pyfunc.load_model(f"runs:/{ack.run_id}/model")
    frame = pandas.DataFrame({"city": ["Rome", "${Oslo}", "Bern", "Rome"], "age": [5.1, None, 3, 4], "more": 1})
    torch.testing.assert_close(torch.from_numpy(model.predict(frame)), module(rows).detach())
    whole = frame.assign(age=[1, 2, 3, 4])  # int64, which MLflow does not accept as float64
    assert model.predict(whole).shape == (4, 3)
    assert model.metadata.signature.inputs.input_names() == ["age", "city"]
    assert model.metadata.signature.outputs.inputs[0].shape == (-1, 3)
    with pytest.raises(mlflow.MlflowException, match=r"missing inputs \['city'\]"):
        model.predict(frame.drop(columns="city"))
    assert type(mlflow.pytorch.load_model(f"runs:/{ack.run_id}/model")(rows)) is torch.Tensor


PAIR = {"pair": [torch.rand(3, 8)], "scale": torch.tensor(2.0)}


@pytest.mark.parametrize(
    ("make", "inputs", "more"),
    [(TwoInputs, {"a": torch.rand(3, 8), "b": torch.rand(3, 8)}, {}), (OfPairs, torch.rand(3, 8), PAIR)],
)
def test_nested_and_several_inputs_are_stored(make, inputs, more, publish):
    import mlflow

    recorded = make().eval()
    ack, module = publish(make, call_of(recorded, lambda: recorded(inputs, **more)))
    assert ack.is_complete and ack.warnings == ()
    loaded = mlflow.pytorch.load_model(f"runs:/{ack.run_id}/model")
    torch.testing.assert_close(loaded(inputs, **more), module(inputs, **more))


def test_example_of_two_tensors_has_their_names(publish):
    import mlflow

    module = nn.Bilinear(8, 8, 2)
    example = call_of(module, lambda: module(torch.rand(3, 8), input2=torch.rand(3, 8)))
    ack, _ = publish(lambda: nn.Bilinear(8, 8, 2), example)
    signature = mlflow.models.get_model_info(f"runs:/{ack.run_id}/model").signature
    assert signature.inputs.input_names() == ["input1", "input2"]


def test_example_that_forward_refuses_is_left_out_with_help(publish):
    ack, _ = publish(OfPairs, torch.rand(3, 8))
    (warning,) = ack.warnings
    assert "missing 1 required positional argument: 'pair'" in warning and "tracking.log_model=false" in warning


def test_custom_call_is_recorded_before_forward():
    model = nn.Linear(2, 1)
    assert call_of(model, lambda: None) is None
    model.forward = None  # not needed
    rows = torch.ones(3, 2)
    assert call_of(model, lambda: model(rows)) is rows
    before = torch.get_rng_state()
    assert call_of(model, lambda: model(rows, torch.rand(1)))["forward()"]["args"][0] is rows
    assert torch.equal(before, torch.get_rng_state())


def test_model_includes_code_of_current_directory(folder, journal, write, uri, tmp_path, monkeypatch, elsewhere):
    home = tmp_path / "home"
    home.mkdir()
    branch = "super().forward(x) if x.sum().item() > 0 else x"  # has no graph
    source = f"from torch import nn\nclass Net(nn.Linear):\n    def forward(self, x):\n        return {branch}\n"
    (home / "my_own_models.py").write_text(source)
    monkeypatch.chdir(home)
    monkeypatch.setattr(sys, "path", [*sys.path])
    torch.save({"model": nn.Linear(8, 10).state_dict()}, folder / "w.pt")
    torch.save(torch.rand(4, 8), folder / "e.pt")
    write.start(journal)
    node = {"_target_": "my_own_models.Net", "in_features": 8, "out_features": 10}
    journal.event("model", node=node, weights="w.pt", example="e.pt")
    uploader = Uploader(folder, uri)
    assert uploader.attempt() and uploader.ack.warnings == ()
    sys.modules.pop("my_own_models")
    code = (
        f"mlflow.set_tracking_uri({uri!r})\n"
        f"model = mlflow.pytorch.load_model('runs:/{uploader.ack.run_id}/model')\n"
        "assert type(model).__module__ == 'my_own_models' and model(torch.rand(2, 8)).shape == (2, 10)"
    )
    elsewhere(code, tmp_path)


def test_code_is_found_by_module_name(tmp_path, monkeypatch):
    files = {"alone": "alone.py", "package.deep.net": "package/deep/net.py", "inner": "checkout/inner.py"}
    files |= {"other": "lib/site-packages/other.py", "package.moved": "checkout/package/moved.py"}
    parts = []
    for name, file in files.items():
        module = ModuleType(name)
        module.__file__ = str(tmp_path / file)
        monkeypatch.setitem(sys.modules, name, module)
        parts.append(type("Net", (nn.Module,), {"__module__": name})())
    monkeypatch.chdir(tmp_path)
    code = mlflow_model._own_code(nn.Sequential(*parts, mlp()))
    assert code == [str(tmp_path / "alone.py"), str(tmp_path / "package")]


@pytest.mark.parametrize(
    ("file", "content", "reason"),
    [
        ("checkpoints/best.pt", None, "FileNotFoundError"),
        ("journal/example.pt", "nonsense", "UnpicklingError"),
        ("checkpoints/best.pt", {"model": {}}, "Missing key(s) in state_dict"),
    ],
)
def test_model_that_fails_is_a_warning(file, content, reason, folder, publish, uri, bare):
    ack, _ = publish(mlp, torch.rand(4, 1, 8, 8))
    if content is None:
        (folder / file).unlink()
    elif content == "nonsense":
        (folder / file).write_bytes(b"nonsense")
    else:
        torch.save(content, folder / file)
    with pytest.raises(LeftOutError) as caught:
        event = {"node": {}, "weights": "checkpoints/best.pt", "example": "journal/example.pt", "record": -1}
        client = mlflow_store.open_store(uri)
        more = {"folder": folder, "event": event, "build": lambda node: mlp()}
        mlflow_model.publish_model(client, ack.run_id, ack.experiment_id, **more)
    assert reason in str(caught.value)


def test_model_that_does_not_build_warns(publish):
    def fail(node):
        raise RuntimeError("no such layer")

    ack, _ = publish(mlp, torch.rand(4, 1, 8, 8), build=fail)
    assert ack.is_complete and "model was left out: RuntimeError: no such layer" in ack.warnings[0]


def test_target_that_is_not_allowed_is_refused(folder, journal, uri, client):
    with pytest.raises(LeftOutError, match="allowed"):
        event = {"kind": "model", "node": {"_target_": "os.system", "command": "true"}, "weights": "w", "example": "e"}
        mlflow_model.publish_model(client, "0", "0", folder=folder, event=event)


#: the metrics of an event; the journal also has the step's points
SHOWN = {
    "name": "mlp-my.csv",
    "step": 2,
    "params": {"model": "mlp", "optimizer.lr": "0.1"},
    "metrics": {"val/loss": (0.25, 2, 1_700_000_000_002), "val/f1[0]": (float("nan"), 2, 1_700_000_000_002)},
    "dataset": ["my.csv", "f" * 32],
}
CALLS = ("create_logged_model", "log_outputs", "log_batch", "log_model_artifacts", "finalize_logged_model")


def check_shown(client, ack):
    """The run has the model, its step, and each of its metrics, once."""
    entry, run = stored(client, ack.run_id), client.get_run(ack.run_id)
    assert (entry.name, entry.status, entry.source_run_id) == ("mlp-my-csv", "READY", ack.run_id)
    assert entry.params == SHOWN["params"] and entry.tags[mlflow_model.WEIGHTS_TAG] == mlflow_model.BEST
    outputs = [(output.model_id, output.step) for output in run.outputs.model_outputs]
    assert outputs == [(entry.model_id, 2)]
    (metric,) = entry.metrics  # MLflow would store NaN as 0, the best of all losses
    assert (metric.key, metric.value, metric.step, metric.run_id) == ("val/loss", 0.25, 2, ack.run_id)
    assert [metric.dataset_name, metric.dataset_digest] == SHOWN["dataset"]
    points = client.get_metric_history(ack.run_id, "val/loss")
    assert [(point.step, point.timestamp, point.value) for point in points] == [(2, 1_700_000_000_002, 0.25)]


@pytest.fixture
def bare(monkeypatch):
    """Store models without their weights, as exporting one takes seconds."""

    def save(place, run_id, module, example, *, reader):
        from mlflow.models import Model

        (place / "bare").mkdir()
        Model(run_id=run_id).save(str(place / "bare" / "MLmodel"))
        return place / "bare"

    monkeypatch.setattr(mlflow_model, "save", save)


def test_model_metrics_have_names_of_points(publish, journal, client, bare):
    journal.event("start", uid="u", experiment="digits")
    journal.points(("val/p>1", "val/p<1"), [2], [1_700_000_000_002], [[0.25, 0.5]])
    measured = {"val/p<1": (0.5, 2, 1_700_000_000_002), "val/p>1": (0.25, 2, 1_700_000_000_002)}
    ack, _ = publish(mlp, torch.rand(4, 1, 8, 8), **SHOWN | {"metrics": measured})
    found = {metric.key: metric.value for metric in stored(client, ack.run_id).metrics}
    assert found == client.get_run(ack.run_id).data.metrics and found["val/p_1"] == 0.25 and len(found) == 2


@pytest.mark.parametrize("is_taken", [False, True], ids=["before", "after"])
@pytest.mark.parametrize("call", CALLS)
def test_kill_at_any_call_leaves_one_model(call, is_taken, publish, journal, folder, uri, client, monkeypatch, bare):
    real = getattr(type(client), call)

    def killed(self, *args, **more):
        if call == "log_batch" and not (len(args) > 1 and args[1][0].model_id):
            return real(self, *args, **more)  # the run's points, not the model's
        if is_taken:
            real(self, *args, **more)
        raise KeyboardInterrupt

    journal.event("start", uid="u", experiment="digits")
    journal.points(("val/loss",), [2], [1_700_000_000_002], [[0.25]])
    with monkeypatch.context() as kill:
        kill.setattr(type(client), call, killed)
        with pytest.raises(KeyboardInterrupt):
            publish(mlp, torch.rand(4, 1, 8, 8), **SHOWN)
    assert not read_ack(folder).is_complete
    again = Uploader(folder, uri, build=lambda node: mlp())
    assert again.attempt(postponed=True) and again.ack.is_complete and again.ack.warnings == ()
    check_shown(client, again.ack)
    write_ack(folder, Ack(uri=again.ack.uri))  # send everything again, except the model's files
    monkeypatch.setattr(type(client), "log_model_artifacts", None)
    once_more = Uploader(folder, uri, build=lambda node: mlp())
    assert once_more.attempt(postponed=True) and once_more.ack.is_complete and once_more.ack.warnings == ()
    check_shown(client, once_more.ack)


def test_kept_checkpoint_is_another_model(publish, journal, folder, uri, client, bare):
    publish(mlp, torch.rand(4, 1, 8, 8), **SHOWN)
    state = torch.load(folder / "checkpoints" / "best.pt")
    torch.save(state | {"step": 1}, folder / "checkpoints" / "step-1.pt")
    kept = SHOWN | {"step": 1, "weights": "checkpoints/step-1.pt", "metrics": {"val/loss": (0.5, 1, 1)}}
    journal.event("model", node={"_target_": "fake"}, example="journal/example.pt", **kept)
    uploader = Uploader(folder, uri, build=lambda node: mlp())
    assert uploader.attempt(postponed=True) and uploader.ack.warnings == ()
    found = mlflow_model.models_of(client, uploader.ack.run_id, uploader.ack.experiment_id)
    steps = {output.model_id: output.step for output in client.get_run(uploader.ack.run_id).outputs.model_outputs}
    assert sorted((steps[model.model_id], mlflow_model.is_best(model)) for model in found) == [(1, False), (2, True)]


def test_models_are_ranked_and_selected(uri, tmp_path, write, client, monkeypatch, bare):
    monkeypatch.setattr(mlflow_model, "_rebuilt", lambda *args: (None, None))
    losses, run_ids = [0.5, 0.1, 2.0, 0.3], {}
    for loss in losses:
        with Journal(tmp_path / str(loss)) as journal:
            write.start(journal)
            measured = {"val/loss": (loss, 3, 1_700_000_000_003), "test/loss": (9.0, 5, 1_700_000_000_005)}
            shown = SHOWN | {"step": 3, "metrics": measured, "params": {"model": f"m{loss:.0f}"}}
            journal.event("model", node={"_target_": "fake"}, weights="w", example="e", **shown)
            write.end(journal)
        uploader = Uploader(tmp_path / str(loss), uri)
        assert uploader.attempt(postponed=True) and uploader.ack.is_complete, uploader.ack
        run_ids[uploader.ack.run_id] = loss
    order = [{"field_name": "metrics.val/loss", "ascending": True, "dataset_name": "my.csv"}]
    ranked = client.search_logged_models([uploader.ack.experiment_id], order_by=order)
    assert [run_ids[model.source_run_id] for model in ranked] == sorted(losses)
    words = "params.model = 'm0' AND metrics.`val/loss` < 0.2"
    selected = client.search_logged_models([uploader.ack.experiment_id], words)
    assert [run_ids[model.source_run_id] for model in selected] == [0.1]


@pytest.mark.parametrize("wrong", [{"metrics": {"a": ["b", 1, 1]}}, {"dataset": ["one"]}, {"params": 5}, {"step": "x"}])
def test_foreign_model_event_is_a_warning(wrong, publish, bare):
    ack, _ = publish(mlp, torch.rand(4, 1, 8, 8), **SHOWN | wrong)
    assert ack.is_complete and "was left out" in ack.warnings[0]


@pytest.mark.parametrize("takes_graph", [True, False])
def test_graph_of_own_run_is_used(takes_graph, folder, journal, write, uri, client):
    node = {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 10}
    event = {"node": node, "weights": "w.pt", "example": "e.pt"}
    torch.save({"model": nn.Linear(8, 10).state_dict()}, folder / "w.pt")
    torch.save(torch.rand(4, 8), folder / "e.pt")
    state = torch.random.get_rng_state()
    assert mlflow_model.leave_graph(folder, event)
    assert torch.equal(torch.random.get_rng_state(), state)
    write.start(journal)
    journal.event("model", **event)
    built = []

    def build(node):
        built.append(node)
        return nn.Linear(8, 10)

    uploader = Uploader(folder, uri, build=build, takes_graph=takes_graph)
    assert uploader.attempt() and uploader.ack.warnings == () and built == ([] if takes_graph else [node])
    assert stored(client, uploader.ack.run_id).status == "READY"
    assert not (folder / mlflow_model.GRAPH).exists()


@pytest.mark.parametrize("takes_graph", [True, False])
def test_model_with_overwritten_weights_is_left_out(takes_graph, folder, journal, write, uri, client, monkeypatch):
    """Its run was extended before it was sent: best.pt and the graph are from a later step."""
    node = {"_target_": "torch.nn.Linear", "in_features": 8, "out_features": 10}
    event = {"node": node, "weights": mlflow_model.BEST, "example": "e.pt", "name": "linear"}
    (folder / "checkpoints").mkdir()
    torch.save({"model": nn.Linear(8, 10).state_dict(), "step": 30}, folder / mlflow_model.BEST)
    torch.save(torch.rand(4, 8), folder / "e.pt")
    assert mlflow_model.leave_graph(folder, event | {"step": 30})
    write.start(journal)
    journal.event("model", **event, step=12)
    uploader = Uploader(folder, uri, takes_graph=takes_graph)
    with monkeypatch.context() as at_first:
        if takes_graph:
            at_first.setattr(mlflow_model, "_rebuilt", None)  # needs torch
        assert uploader.attempt()
    (warning,) = uploader.ack.warnings
    what = "the run's graph" if takes_graph else mlflow_model.BEST
    assert warning == f"model linear was left out: {what} has the weights of step 30 now, and the model is of step 12"
    journal.event("model", **event, step=30)
    assert uploader.attempt() and len(uploader.ack.warnings) == 1
    assert [output.step for output in client.get_run(uploader.ack.run_id).outputs.model_outputs] == [30]


def test_model_that_does_not_build_leaves_nothing(folder):
    event = {"node": {"_target_": "torch.nn.Linear"}, "weights": "w.pt", "example": "e.pt"}
    assert not mlflow_model.leave_graph(folder, event) and not (folder / mlflow_model.GRAPH).exists()

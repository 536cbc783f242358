from functools import partial

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.plugins import Plugins
from hydra.types import RunMode
from omegaconf import OmegaConf
from refused import problems_of

import runner
from runner import cli
from runner.cli.arguments import parse
from runner.cli.table import COMMANDS
from runner.config import compose
from runner.device import Gpu, Hardware
from runner.sweep import grid
from runner.sweep.jobs.ledger import Job, Sweep
from runner.sweep.jobs.prepare import (
    Composer,
    PreparedJob,
    as_word,
    combinations,
    examine,
    folder_problems,
    grid_params,
    zip_of,
)
from runner.sweep.launchers.local import anywhere, devices_for
from runner.sweep.launchers.ray import devices_in
from runner.sweep.sweep import Plan, _folder_problems, _jobs_to_run, _twins

GIB = 2**30
GPU = Hardware(
    cuda=(Gpu("H", 80 * GIB, 70 * GIB, (9, 0)),), torch_version="2.13.0", cuda_build="13.0", arch_list=("sm_90",)
)


@pytest.fixture
def loader():
    from hydra._internal.config_loader_impl import ConfigLoaderImpl
    from hydra._internal.utils import create_config_search_path

    assert Plugins.instance()
    return ConfigLoaderImpl(config_search_path=create_config_search_path(str(compose.CONF)))


def composed(*words):
    return compose.composer([])(list(words))


@pytest.mark.parametrize(
    ("words", "names"),
    [
        (["device=cpu,cuda:0", "seed=1,2"], ["device=cpu seed=1", "device=cpu seed=2", "device=cuda:0 seed=1", "device=cuda:0 seed=2"]),
        (["seed=range(3)", "model=mlp", "sweep.slots.cpu=2", "hydra.verbose=true"], ["seed=0", "seed=1", "seed=2"]),
        (["+model.depth=1,2", "model=net"], ["+model.depth=1", "+model.depth=2"]),
        (["model=mlp", "seed=3"], ["model=mlp seed=3"]),
        (["optimizer.lr=choice(0.1,0.01)"], ["optimizer.lr=0.1", "optimizer.lr=0.01"]),
        (["device=[cuda:1,cpu],mps"], ["device=[cuda:1,cpu]", "device=mps"]),
        (["name='a,b',c"], ["name='a,b'", "name=c"]),
    ],
)  # fmt: skip
def test_combinations_have_readable_names(words, names, loader):
    found = combinations(words, loader)
    assert [name for _, name in found] == names
    assert all(not word.startswith(("sweep.", "hydra.")) for overrides, _ in found for word in overrides)


def test_zip_combines_values_by_row(loader):
    zipped = {
        "model": ["mlp", "cnn"],
        "+model.sizes": [[8, 8], None],
        "name": ["it's", "1"],
        "optimizer.lr": [1e-3, 3e-5],
    }
    jobs = combinations(["seed=1,2", "train.compile=false"], loader, zipped=zipped)
    rows = ["model=mlp", "+model.sizes=[8,8]", r"name='it\'s'", "optimizer.lr=0.001"]
    others = ["model=cnn", "+model.sizes=null", "name='1'", "optimizer.lr=3e-05"]
    expected = [(f"seed={seed}", "train.compile=False", *row) for seed in (1, 2) for row in (rows, others)]
    assert [overrides for overrides, _ in jobs] == expected
    assert jobs[1][1] == "seed=1 model=cnn +model.sizes=null name='1' optimizer.lr=3e-05"
    ((single, _),) = combinations(["seed=3"], loader, zipped={"name": [True]})
    assert single == ("seed=3", "name=true")
    read = [override.value() for override in OverridesParser.create().parse_overrides(jobs[0][0])]
    assert [str(getattr(value, "text", value)) for value in read] == ["1", "False", "mlp", "[8, 8]", "it's", "0.001"]


@pytest.mark.parametrize(
    "text", [r"a\b", r"\d+", "C:\\data\\", r"it's", r"\'", r"a\\'b\'", "\\\\", "", "a,b=[c]", "nan", "'\\", "${x}\\y"]
)
def test_zip_keeps_texts(text, loader):
    """In quotes, Hydra keeps a backslash as it is, except before a quote."""
    for value in (text, [text, {"key": text}]):
        (((word,), _),) = combinations([], loader, zipped={"name": [value]})
        read = OmegaConf.to_container(OmegaConf.create([OverridesParser.create().parse_override(word).value()]))
        expected = OmegaConf.to_container(OmegaConf.create([value]))
        assert read == expected


def test_a_backslash_stays_in_a_jobs_name(loader):
    ((_, name),) = combinations([], loader, zipped={"name": [r"\d"]})
    assert name == r"name='\d'"


@pytest.mark.parametrize(
    ("words", "zipped", "names", "output"),
    [
        (["seed=1,1,2"], {}, ["seed=1", "seed=2"], "1 of 3 are equal to others"),
        (["seed=1,2", "model=mlp,mlp"], {}, ["seed=1 model=mlp", "seed=2 model=mlp"], "2 of 4 are equal to others"),
        (["seed=1"], {"name": ["a", "a", "b"]}, ["name=a", "name=b"], "1 of 3 are equal to others"),
        (["seed=1,2"], {"name": ["a"]}, ["seed=1 name=a", "seed=2 name=a"], ""),
    ],
)
def test_combinations_equal_jobs_run_once(words, zipped, names, output, loader, capsys):
    assert [name for _, name in combinations(words, loader, zipped=zipped)] == names
    out = capsys.readouterr().out
    assert output in out and bool(out) == bool(output)


def test_zip_of_other_forms_is_refused(messages):
    assert zip_of(composed("seed=1")) == {}
    messages(problems_of(zip_of, OmegaConf.create({"sweep": {"zip": [{"seed": [1]}]}})))


def test_zip_reports_all_errors(loader, messages):
    zipped = {"seed": [1, 2], "name": "a", "sweep.retry": [True, False], "optimizer.lr": [0.1]}
    messages(problems_of(combinations, ["seed=3"], loader, zipped=zipped))


@pytest.mark.parametrize(
    "words", [["device=glob(*)"], ["sweep.slots.cpu=1,2"], ["hydra.verbose=true,false", "seed=1,2"]], ids=str
)
def test_combinations_without_jobs_are_refused(words, loader, messages):
    messages(problems_of(combinations, words, loader))


def test_jobs_are_examined_for_a_machine():
    jobs = [composed(f"device={name}") for name in ("cpu", "cuda:0", "cuda:3", "mps", "auto", "banana")]
    jobs.append(composed("device=cuda:3", "train.batch_size=0"))
    machine, *found = examine(jobs, devices_for, True, hardware=GPU)
    assert machine == GPU
    assert [devices for _, _, devices, _ in found] == [("cpu",), ("cuda:0",), (), (), ("cuda:0",), (), ()]
    assert [bool(missing) for *_, missing in found] == [False, False, True, True, False, False, True]
    assert [[problem.source for problem in problems] for problems, *_ in found] == [[]] * 5 + [
        ["device=banana"],
        ["train.batch_size=0"],
    ]


def test_examine_elsewhere_knows_no_devices():
    jobs = [composed("device=cuda:3", "train.precision=bf16"), composed("device=cuda", "train.batch_size=0")]
    _, sound, (problems, *_) = examine(jobs, anywhere, False, hardware=Hardware())
    assert sound == ([], ("cuda:3",), (), None)
    assert [problem.source for problem in problems] == ["train.batch_size=0"]


def test_examine_asks_the_launcher_for_devices():
    jobs = [composed(f"device={name}", "train.precision=bf16") for name in ("auto", "mps")]
    _, there, away = examine(jobs, partial(devices_in, has_gpus=True), False, hardware=Hardware())
    assert there == ([], ("auto",), ("cuda",), None)
    assert (away[0], away[2], away[3].source) == ([], (), "device=mps on Ray")


SWEEP_FILE = """# @package _global_
hydra:
  mode: MULTIRUN
  sweeper: {params: {seed: "1,2", optimizer.lr: "choice(0.1,0.2)", train.num_steps: null}}
"""


def test_params_give_way_to_arguments(loader, own_folder):
    (own_folder / "conf" / "experiment").mkdir(parents=True)
    (own_folder / "conf" / "experiment" / "two.yaml").write_text(SWEEP_FILE)
    found = parse(COMMANDS["train"], ["experiment=two", "device=cpu,cuda:0"])
    assert (found.flags, found.overrides) == (["-m"], ["experiment=two", "device=cpu,cuda:0"])
    master = compose.composer([], mode=RunMode.MULTIRUN)(["experiment=two"])
    params = grid_params(master)
    found = combinations(["experiment=two", "optimizer.lr=0.3"], loader, params=params)
    assert found[0] == (("seed=1", "optimizer.lr=0.3", "train.num_steps=null", "experiment=two"), "seed=1")
    assert [name for _, name in combinations(["seed=5,6"], loader, params=params)] == [
        f"seed={seed} optimizer.lr={rate}" for seed in (5, 6) for rate in (0.1, 0.2)
    ]


def test_params_report_all_errors(loader, messages):
    params = {"seed": "[1", "sweep.retry": True, "model": "mlp"}
    messages(problems_of(combinations, [], loader, params=params))
    messages(problems_of(grid_params, OmegaConf.create({"hydra": {"sweeper": {"parms": {}, "params": None}}})))


def test_hydra_mode_multirun_starts_a_sweep(messages):
    arguments = parse(COMMANDS["train"], ["hydra.mode=MULTIRUN", "seed=1,2"])
    assert (arguments.flags, arguments.overrides) == (["-m"], ["seed=1,2"])
    messages(problems_of(parse, COMMANDS["train"], ["-m", "hydra.mode=RUN"]))


def test_hydra_mode_of_file_starts_sweep(own_folder, monkeypatch, messages):
    (own_folder / "conf" / "experiment").mkdir(parents=True)
    (own_folder / "conf" / "experiment" / "two.yaml").write_text(SWEEP_FILE)
    swept = []
    monkeypatch.setattr(grid, "run_sweep", lambda plan, *_: swept.extend(name for _, name in plan.jobs))
    assert cli.main(["experiment=two", "optimizer.lr=0.3"]) == 0
    assert swept == ["seed=1", "seed=2"]
    messages(problems_of(runner.run, ["experiment=two"]))


def named_by_overrides(left_out=""):
    """Return a composer of jobs whose directories have the names of their overrides, without this key."""
    subdir = "hydra.sweep.subdir=${hydra.job.override_dirname}"
    loader, keys = compose.CheckedLoader(), f"hydra.job.config.override_dirname.exclude_keys=[{left_out}]"
    return Composer(loader, loader.load_configuration("config", [subdir, keys], RunMode.MULTIRUN))


def test_composer_names_directory_by_subdir():
    jobs = [Job(number, ("data=iris", f"device=cuda\\:{number}"), "") for number in (0, 1)]
    jobs.append(Job(2, ("seed=1",), "", folder_name="as it was"))
    composer = named_by_overrides("data")
    configs = [composer.compose(job) for job in jobs]
    assert [job.folder_name for job in jobs] == ["device=cuda:0", "device=cuda:1", "as it was"]
    assert [config.hydra.sweep.subdir for config in configs] == [job.folder_name for job in jobs]
    assert folder_problems(jobs) == []


@pytest.mark.parametrize(("left_out", "shared"), [("seed", ["model=linear", "model=mlp"]), ("data", [])])
def test_directories_need_the_seed_where_seeds_are_added(left_out, shared, tmp_path):
    jobs = {number: Job(number, (f"model={model}", "seed=3"), "") for number, model in enumerate(("linear", "mlp"))}
    composer = named_by_overrides(left_out)
    prepared = [PreparedJob(job, composer.compose(job)) for job in jobs.values()]
    plan = Plan((), [(job.overrides, "") for job in jobs.values()], lambda context: None, adds_seeds=True)
    twins = _twins(plan, prepared, composer)
    assert [job.overrides[-1] for job in twins] == ["seed=4", "seed=4"]
    problems = _folder_problems(plan, Sweep(tmp_path, "1", 0, (), jobs=jobs), twins)
    assert [problem.source.partition("subdir=")[2] for problem in problems] == shared


def test_composer_with_numbers_equals_hydra():
    """A copy of another job's configuration with other numbers equals Hydra's composition, which takes 0.1 s per job."""
    each = [
        ("model=mlp", "seed=1", "optimizer.lr=0.1"),
        ("model=mlp", "seed=2", "optimizer.lr=1e-3"),
        ("model=mlp", "seed=7", "optimizer.lr=3", "+data.extra=1"),
        ("model=mlp", "seed=8", "optimizer.lr=null"),
        ("model=mlp", "optimizer.lr=0.5", "seed=3"),
        ("model=mlp", "seed=-1", "optimizer.lr=.5"),
        ("seed=9", "model=mlp", "train.clip_grad_norm=2", "optimizer=sgd"),
        ("seed=9", "model=mlp", "train.clip_grad_norm=0.25", "optimizer=sgd"),
    ]
    composer = named_by_overrides()
    for number, words in enumerate(each):
        job, alone = Job(number, words, ""), Job(number, words, "")
        found, expected = composer.compose(job), Composer(composer._loader, composer._master).compose(alone)
        assert OmegaConf.to_yaml(found) == OmegaConf.to_yaml(expected)
        assert job.folder_name == alone.folder_name


@pytest.mark.parametrize(
    "value", ["müll", "data/übung.csv", "plain/word", "it's", "true", None, 0.5, [1, "ä,b"], {"a": "é"}]
)
def test_as_word_survives_hydras_parser(value):
    assert OverridesParser.create().parse_override(f"a={as_word(value)}").value() == value


def test_folder_problems_name_each_directory_once():
    names = ["same", "same", "data.path=/x/y", "..", ".hidden", "", "it's", "é" * 101, "seed=1,device=cuda:0"]
    problems = folder_problems([Job(number, (), "", folder_name=name) for number, name in enumerate(names)])
    assert [problem.source.partition("subdir=")[2] for problem in problems] == [*names[1:5], "''", *names[6:8]]


def test_free_name_avoids_existing_directories(tmp_path):
    """hydra.sweep.subdir='${hydra.job.num}-${seed}' gives the same names as a retry."""
    jobs = {
        0: Job(0, ("seed=2",), "seed=2", state="failed", folder_name="0-2"),
        1: Job(1, ("seed=3",), "seed=3", state="finished", folder_name="0-1"),
    }
    (tmp_path / "0-2").mkdir()
    (tmp_path / "0-3").mkdir()  # a directory of the user
    plan = Plan(("seed=2,3",), [(job.overrides, job.name) for job in jobs.values()], lambda context: None)
    (again,) = _jobs_to_run(plan, Sweep(tmp_path, "1", 0, (), jobs=jobs), retry=True, grace_seconds=0)
    assert (again.number, again.folder_name) == (0, "0-4")


def test_match_keeps_equal_jobs_of_sweep(tmp_path):
    jobs = {
        number: Job(number, (f"seed={seed}",), f"seed={seed}", state=state, folder_name=str(number))
        for number, (seed, state) in enumerate([(1, "finished"), (2, "interrupted"), (1, "interrupted"), (1, "failed")])
    }
    sweep = Sweep(tmp_path, "1", 0, (), jobs=jobs)
    for seeds, expected in ((("1", "2"), [1, 2]), (("2", "1", "1", "1"), [1, 2]), (("1", "3"), [4, 2])):
        plan = Plan(("seed=",), [((f"seed={seed}",), f"seed={seed}") for seed in seeds], lambda context: None)
        assert [job.number for job in _jobs_to_run(plan, sweep, retry=False, grace_seconds=0)] == expected

from functools import partial

import pytest
from hydra.core.plugins import Plugins

from runner import compose
from runner.device import Gpu, Hardware
from runner.errors import RunnerError
from runner.sweep.jobs import combinations, examine
from runner.sweep.places import anywhere, devices_for
from runner.sweep.ray_devices import devices_in

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
    with compose.hydra_session(["runner"]):
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
def test_every_combination_is_a_job_with_a_readable_name(words, names, loader):
    found = combinations(words, loader)
    assert [name for _, name in found] == names
    assert all(not word.startswith(("sweep.", "hydra.")) for overrides, _ in found for word in overrides)


@pytest.mark.parametrize(
    "words", [["device=glob(*)"], ["sweep.slots.cpu=1,2"], ["hydra.verbose=true,false", "seed=1,2"]]
)
def test_a_sweep_over_nothing_or_over_its_own_settings_is_refused(words, loader):
    with pytest.raises(RunnerError):
        combinations(words, loader)


def test_jobs_are_examined_for_a_machine():
    jobs = [composed(f"device={name}") for name in ("cpu", "cuda:0", "cuda:3", "mps", "auto", "banana")]
    jobs.append(composed("device=cuda:3", "train.batch_size=0"))
    machine, *found = examine(jobs, devices_for, True, hardware=GPU)
    assert machine == GPU
    assert [devices for _, _, devices, _ in found] == [("cpu",), ("cuda:0",), (), (), ("cuda:0",), (), ()]
    assert [bool(missing) for *_, missing in found] == [False, False, True, True, False, False, True]
    assert [[fault.asked for fault in faults] for faults, *_ in found] == [[]] * 5 + [
        ["device=banana"],
        ["train.batch_size=0"],
    ]


def test_where_the_jobs_run_elsewhere_nobody_knows_their_devices():
    jobs = [composed("device=cuda:3", "train.precision=bf16"), composed("device=cuda", "train.batch_size=0")]
    _, sound, (faults, *_) = examine(jobs, anywhere, False, hardware=Hardware())
    assert sound == ([], ("cuda:3",), (), None)
    assert [fault.asked for fault in faults] == ["train.batch_size=0"]


def test_the_launcher_says_which_devices_there_are():
    jobs = [composed(f"device={name}", "train.precision=bf16") for name in ("auto", "mps")]
    _, there, away = examine(jobs, partial(devices_in, has_gpus=True), False, hardware=Hardware())
    assert there == ([], ("auto",), ("cuda",), None)
    assert (away[0], away[2], away[3].asked) == ([], (), "device=mps on Ray")

"""Settings that several processes do not support, and processes that another launcher has started."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.config.compose import composer
from runner.device import Choice, Gpu, Hardware
from runner.distributed import messages
from runner.errors import RunnerError
from runner.experiment import check, processes
from runner.experiment.context import RunContext

GIB = 2**30
GPUS = Hardware(
    cuda_build="12.8",
    arch_list=("sm_90",),
    torch_version="2.13",
    cuda=(Gpu("H100", 80 * GIB, 70 * GIB, (9, 0)), Gpu("H100", 80 * GIB, 60 * GIB, (9, 0))),
)
SECOND = {"RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"}


def composed(*words):
    return composer([])(list(words))


@pytest.fixture
def devices(monkeypatch):
    monkeypatch.setattr(check, "probe", lambda: GPUS)

    def of(*words, slot=None, environ=None, trial=None):
        for name, value in (environ or {}).items():
            monkeypatch.setenv(name, value)
        context = RunContext(device=Choice(slot, "as asked") if slot else None, trial=trial)
        return [each.device for each in check.check_here(composed(*words), context=context).devices]

    return of


@pytest.mark.parametrize(
    ("words", "more", "expected"),
    [
        (["device=all"], {}, ["cuda:0", "cuda:1"]),
        (["device=all"], {"environ": SECOND}, ["cuda:1"]),
        (["device=all"], {"environ": SECOND, "slot": "cuda:0"}, ["cuda:0"]),
        (["device=cuda"], {"slot": "cuda:0"}, ["cuda:0"]),
        (["device=cpu", "train.num_processes=2"], {"slot": "cpu"}, ["cpu", "cpu"]),
        (["train.num_processes=2"], {"environ": SECOND}, ["cuda:1"]),
    ],
)
def test_each_process_gets_its_device(devices, words, more, expected):
    assert devices(*words, **more) == expected


REFUSED = [
    (["device=all"], {"slot": "cuda:0"}, "a sweep gives each of its jobs one device"),
    (["device=cuda", "train.num_processes=2"], {"slot": "cuda:0"}, "a sweep gives each of its jobs one device"),
    (["device=all", "train.on_oom=split"], {}, "can't each repeat a step in parts"),
    (["device=all", "train.cuda_graph=true"], {}, "a captured step"),
    (["device=all"], {"trial": SimpleNamespace()}, "hydra.sweeper.pruner=none"),
    (["device=all", "train.on_oom=split"], {"environ": SECOND}, "can't each repeat a step in parts"),
    (["train.num_processes=4"], {"environ": SECOND}, "torchrun has started 2 processes"),
    (["train.num_processes=3"], {}, "each process needs its own device"),
]


@pytest.mark.parametrize(("words", "more", "expected"), REFUSED)
def test_unsupported_settings_of_several_are_refused(devices, words, more, expected):
    with pytest.raises(RunnerError, match=expected):
        devices(*words, **more)


@pytest.mark.parametrize(
    ("platform", "own", "found"), [("darwin", None, "lo0"), ("darwin", "en0", "en0"), ("linux", None, None)]
)
def test_mac_processes_use_loopback_network(platform, own, found, monkeypatch):
    """gloo resolves the machine's name, which often fails on a Mac."""
    monkeypatch.setattr(sys, "platform", platform)
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", own or "")
    if own is None:
        monkeypatch.delenv("GLOO_SOCKET_IFNAME")
    assert processes._environment({}).get("GLOO_SOCKET_IFNAME") == found


@pytest.mark.parametrize(
    ("num", "is_launched", "error"),
    [
        (2, False, "ValueError: today's"),
        (2, True, "RuntimeError: last week's"),
        (1, False, "RuntimeError: last week's"),
    ],
)
def test_old_rank_messages_are_deleted_first(tmp_path, num, is_launched, error):

    def failing(folder):
        messages.record(Path(folder), 1, "ValueError: today's")

    messages.record(tmp_path, 0, "RuntimeError: last week's")
    processes.share_directory(SimpleNamespace(num=num, broadcast_object=failing), tmp_path, is_launched=is_launched)
    assert messages.first_failure(tmp_path).text == error

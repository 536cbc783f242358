"""Settings that several processes do not support, and processes that another launcher has started."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from runner.config.compose import composer
from runner.device import Choice, Gpu, Hardware
from runner.distributed import messages
from runner.distributed.environment import RankInfo
from runner.errors import RunnerError
from runner.experiment import processes
from runner.experiment.context import Checked, RunContext

GIB = 2**30
GPUS = Hardware(
    cuda_build="12.8",
    arch_list=("sm_90",),
    torch_version="2.13",
    cuda=(Gpu("H100", 80 * GIB, 70 * GIB, (9, 0)), Gpu("H100", 80 * GIB, 60 * GIB, (9, 0))),
)
SECOND = RankInfo(1, 2, 1, 2, "node", 1234, "torchrun")


def composed(*words):
    return composer([])(list(words))


def devices(*words, choice=None, place=None, is_given=False, has_trial=False):
    choice = choice or Choice("cuda:0", "as asked")
    context = RunContext(device=choice if is_given else None, trial=SimpleNamespace() if has_trial else None)
    found = processes.choose_devices(composed(*words), Checked(GPUS, choice), place, context)
    return [each.device for each in found]


def test_all_is_a_process_for_each_gpu():
    assert devices("device=all") == ["cuda:0", "cuda:1"]


def test_a_member_has_its_own():
    assert devices("device=all", place=SECOND) == ["cuda:1"]
    assert devices("device=all", place=SECOND, choice=Choice("cuda:7", "given"), is_given=True) == ["cuda:7"]


def test_a_job_of_a_sweep_takes_what_its_slot_has():
    assert devices("device=cuda", is_given=True) == ["cuda:0"]
    cpu = Choice("cpu", "as asked")
    assert devices("device=cpu", "train.num_processes=2", choice=cpu, is_given=True) == ["cpu", "cpu"]


REFUSED = [
    (["device=all"], {"is_given": True}, "a sweep gives each of its jobs one device"),
    (["device=cuda", "train.num_processes=2"], {"is_given": True}, "a sweep gives each of its jobs one device"),
    (["device=all", "train.on_oom=split"], {}, "can't each repeat a step in parts"),
    (["device=all", "train.cuda_graph=true"], {}, "a captured step"),
    (["device=all"], {"has_trial": True}, "hydra.sweeper.pruner=none"),
    (["device=all", "train.on_oom=split"], {"place": SECOND}, "can't each repeat a step in parts"),
]


@pytest.mark.parametrize(("words", "how", "told"), REFUSED)
def test_what_several_can_not_do_is_refused(words, how, told):
    with pytest.raises(RunnerError, match=told):
        devices(*words, **how)


def test_a_number_that_contradicts_the_launcher_is_refused(monkeypatch):
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(RunnerError, match="torchrun has started 2 processes"):
        processes.find_rank(composed("train.num_processes=4"))
    assert processes.find_rank(composed("train.num_processes=2")).num == 2
    assert processes.find_rank(composed()).num == 2


@pytest.mark.parametrize(
    ("platform", "own", "found"), [("darwin", None, "lo0"), ("darwin", "en0", "en0"), ("linux", None, None)]
)
def test_processes_of_one_mac_meet_on_its_own_network(platform, own, found, monkeypatch):
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
def test_last_words_of_a_part_before_are_gone_when_the_others_know_the_folder(tmp_path, num, is_launched, error):

    def failing(folder):
        messages.record(Path(folder), 1, "ValueError: today's")

    messages.record(tmp_path, 0, "RuntimeError: last week's")
    processes.share_directory(SimpleNamespace(num=num, broadcast_object=failing), tmp_path, is_launched=is_launched)
    assert messages.first_failure(tmp_path).text == error

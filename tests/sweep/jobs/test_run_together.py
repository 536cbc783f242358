"""Groups of runs that one process trains, one after the other."""

import gc
import re
import resource
import weakref
from dataclasses import replace

import pytest
import torch
from omegaconf import open_dict

from runner.config.compose import composer
from runner.config.validate import how_to_cut
from runner.data.split import indices, rows_of
from runner.device import Choice, Gpu, Hardware, host_memory, torch_private
from runner.device.placement import map_tensors, tensors
from runner.errors import Problem, RunnerError
from runner.experiment import build, build_data, provenance, session
from runner.experiment.build import prepare
from runner.experiment.context import RunContext
from runner.experiment.reporter import Reporter
from runner.experiment.summary import Summary
from runner.sweep.jobs import run_together as together
from runner.sweep.jobs.run_together import CannotStackError, PlannedRun, run_together
from runner.tracking.journal_reader import read_events

CPU = torch.device("cpu")
WORDS = ["data=digits", "data.limit=100", "model=mlp", "model.hidden_sizes=[8]", "train.num_steps=1"]
WORDS += ["tracking.enabled=false", "task.plots=false", "device=cpu", "sweep.batch=8"]


def job(folder, seed, *more):
    cfg = composer([])([*WORDS, f"seed={seed}", *more])
    with open_dict(cfg):
        cfg.pop("hydra")
    folder = folder / str(seed)
    folder.mkdir()
    return PlannedRun(cfg, folder, RunContext(device=Choice("cpu", "as asked", "cpu")))


def test_run_together_frees_former_group(tmp_path, monkeypatch):
    prepare, models, left = together.prepare, [], []

    def watched(*arguments, **more):
        left.append(sum(model() is not None for model in models))
        parts = prepare(*arguments, **more)
        models.append(weakref.ref(parts.model))
        return parts

    monkeypatch.setattr(together, "prepare", watched)
    gc.disable()  # a collection would happen at some time
    try:
        for seed in (0, 1):
            assert run_together([job(tmp_path, seed)])[0].status == "finished"
    finally:
        gc.enable()
    assert left == [0, 0]


def test_compiled_jobs_train_in_a_group(tmp_path, monkeypatch):
    """tests/training/stacked/test_compiled.py compares the numbers."""
    monkeypatch.setattr(torch_private, "compile_graph", lambda graph, inputs, options: graph)
    words = ("train.compile=true", "train.batch_size=40", "train.num_steps=2")
    jobs = [job(tmp_path, seed, *words) for seed in range(2)]
    assert [each.status for each in run_together(jobs).values()] == ["finished"] * 2
    for each in jobs:
        log = (each.folder / "console.log").read_text()
        assert re.search(r"batch   .*; compile: forward and backward are one function; made in [\d.]+ s", log)


@pytest.mark.parametrize(("module", "name"), [(Reporter, "log_model"), (session, "illustrate")])
def test_failing_end_fails_only_its_member(tmp_path, monkeypatch, module, name):
    whole, requested = getattr(module, name), []

    def fails_once(*arguments, **more):
        requested.append(arguments)
        if len(requested) == 1:
            raise RuntimeError("unexpected pos 704 vs 598\nin its file")
        return whole(*arguments, **more)

    monkeypatch.setattr(module, name, fails_once)
    jobs = [job(tmp_path, seed) for seed in range(2)]
    summaries = run_together(jobs)
    assert sorted(each.status for each in summaries.values()) == ["failed", "finished"]
    for number, summary in summaries.items():
        ending = Summary.read(jobs[number].folder)
        events = [event for event in read_events(jobs[number].folder) if event["kind"] == "end"]
        assert ending.status == summary.status and ending.metrics["val/loss"] > 0
        assert events[-1]["status"] == ("FINISHED" if summary.status == "finished" else "FAILED")
        if summary.status == "failed":
            assert ending.error.startswith("RuntimeError: unexpected pos 704")


def composed(*words):
    cfg = composer([])(["device=cpu", "tracking.enabled=false", *words])
    with open_dict(cfg):
        cfg.pop("hydra")
    return cfg


GIVEN = ["model=linear", "data=mnist1d", "data.num_rows=50", "data.num_test_rows=20"]
TEXT = ["data=text", "data.path=words.txt", "data.context_length=4", "model=gpt", "task=language"]


@pytest.mark.parametrize(
    ("words", "each"),
    [
        (["model=linear"], ["seed=0", "seed=1"]),
        (["model=linear", "data.num_folds=3"], ["data.fold=0", "data.fold=1"]),
        (["model=linear", "data.augment={crop:1,mixup:0.2}"], ["seed=0", "seed=1"]),
        (["model=linear", "data.sampler=balanced", "data.test_fraction=0"], ["seed=0", "seed=1"]),
        (GIVEN, ["seed=0", "seed=1"]),
        ([*GIVEN, "data.val_fraction=0"], ["seed=0", "seed=1"]),
        ([*TEXT, "model.width=8", "model.depth=1", "model.num_heads=1"], ["seed=0", "seed=1"]),
    ],
)
def test_common_rows_give_same_batches_once(own_folder, words, each):
    (own_folder / "words.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 9)
    common, places = together.CommonRows(), set()
    for own in each:
        cfg = composed(*words, own)
        alone, parts = prepare(cfg, CPU), prepare(cfg, CPU)
        parts = common.shared(parts, cfg)
        for name in ("train", "val", "test"):
            split, expected = getattr(parts, name), getattr(alone, name)
            if expected is None:
                assert split is None
                continue
            places |= {tensor.data_ptr() for tensor in tensors(split._rows)}
            for at in ((0, 0), (3, 1)):
                batches = [list(one.epoch(at[0], first_batch=at[1])) for one in (split, expected)]
                assert len(batches[0]) == len(batches[1])
                assert all(map(torch.equal, tensors(batches[0]), tensors(batches[1])))
            indexed = [one.indexed() for one in (split, expected)]
            for one in indexed:
                one.begin(2)
            gathered = [one.gather(torch.arange(split.num_rows).flip(0)) for one in indexed]
            assert all(map(torch.equal, *map(tensors, gathered)))
            assert all(one.is_aligned(7) == expected.indexed().is_aligned(7) for one in indexed)
            kept = [rows_of(getattr(one.splits, name)) for one in (parts, alone)]
            assert all(map(torch.equal, *map(tensors, kept)))
            assert split.device_bytes <= expected.device_bytes
    assert len(places) == len(tensors((parts.source.rows, dict(parts.source.given))))


def test_common_rows_with_other_data_copy():
    cfg = composed("model=linear")
    common, parts = together.CommonRows(), prepare(cfg, CPU)
    assert common.shared(parts, cfg).source is not parts.source
    others = replace(parts, source=replace(parts.source, rows=map_tensors(parts.source.rows, lambda rows: rows + 1)))
    assert common.shared(others, cfg) is others


def test_group_reads_data_once(tmp_path, monkeypatch):
    check, found = together.check_alike, []

    def watched(members, **more):
        found.extend(members)
        return replace(check(members, **more), num_together=3)

    monkeypatch.setattr(together, "check_alike", watched)
    read, build_one = [], build_data.build
    for module in (build, build_data):
        monkeypatch.setattr(module, "build", lambda node, *, key: read.append(key) or build_one(node, key=key))
    run_together([job(tmp_path, seed) for seed in range(3)])
    assert read.count("data") == 1 and read.count("model") == 3
    splits = [split for member in found for split in (member.parts.train, member.parts.val, member.parts.test)]
    assert len(splits) == 9
    assert len({tensor.data_ptr() for split in splits for tensor in tensors(split._rows)}) == 2
    notes = [provenance.notes((tmp_path / str(seed) / "environment.txt").read_text()) for seed in range(3)]
    assert [each[provenance.TOGETHER] for each in notes] == ["3 jobs"] * 3


@pytest.mark.parametrize(
    ("num_processes", "device", "requested", "raised"),
    [
        (4, "cuda:0", "data.residency=device", CannotStackError),
        (1, "cuda:0", "data.residency=device", RunnerError),
        (4, "cpu", "data.residency=device", RunnerError),
        (4, "cuda:0", "data.limit=0", RunnerError),
    ],
)
def test_data_without_memory_prevents_a_group(tmp_path, monkeypatch, num_processes, device, requested, raised):

    def prepared(*arguments, **more):
        raise RunnerError(Problem(requested, "the set takes 3 GiB, and it has 2 GiB free", "data.residency=stream"))

    monkeypatch.setattr(together, "prepare", prepared)
    monkeypatch.setattr(host_memory, "_num_processes", num_processes)
    one = replace(job(tmp_path, 0), context=RunContext(device=Choice(device, "as asked", device)))
    with pytest.raises(raised, match="3 GiB") as caught:
        together._prepared(one, Hardware(cuda=(Gpu("H"),)), together.CommonRows())
    if raised is CannotStackError:
        assert str(caught.value).endswith("; or sweep.batch=128, one group")
        assert Summary.read(one.folder) == Summary()  # like a run that has not started


@pytest.mark.parametrize(
    ("words", "is_read"),
    [
        (["data=mnist1d"], True),
        (["data=mnist1d", "data.fold=1", "data.num_folds=3"], True),
        (["data=mnist1d", "data.seed=${seed}"], False),
        (["data=mnist1d", "data.name=other"], False),
        (["data._target_=own_data.drawn"], False),
    ],
)
def test_common_rows_read_built_in_data_once(words, is_read, own_folder, monkeypatch):
    (own_folder / "own_data.py").write_text(
        "import torch\ndef drawn(): return torch.rand(40, 3), torch.arange(40) % 2\n"
    )
    monkeypatch.syspath_prepend(own_folder)
    common, first = together.CommonRows(), composed("data=mnist1d", "model=linear", "seed=1")
    assert common.read(first) is None
    kept = common.shared(prepare(first, CPU), first).source
    cfg = composed("model=linear", *words, "seed=2")
    read = common.read(cfg)
    assert (read is not None) is is_read
    if read is not None:
        assert all(one is other for one, other in zip(*map(tensors, (read.source.rows, kept.rows)), strict=True))
        ours, alone = prepare(cfg, CPU, read=read), prepare(cfg, CPU)
        assert all(map(torch.equal, tensors(next(ours.train.epoch(0))), tensors(next(alone.train.epoch(0)))))
        assert all(map(torch.equal, ours.model.parameters(), alone.model.parameters()))
    if words[0].startswith("data._target_"):
        common = together.CommonRows()
        common.shared(prepare(cfg, CPU), cfg)
        assert common.read(cfg) is None


def test_room_for_files_respects_the_limit(monkeypatch):
    """256 is a Mac's usual limit: of 64 runs, all failed, 26 of them after the start."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, before[1]))
    try:
        with monkeypatch.context() as refused:
            refused.setattr(resource, "setrlimit", lambda *arguments: (_ for _ in ()).throw(ValueError))
            assert together._room_for_files(64) == 32
        assert together._room_for_files(64) == 64
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == 64 + 6 * 64
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


@pytest.mark.parametrize(
    ("free_sets", "limit", "is_worth_it"),
    [(None, None, True), (2.0, None, True), (1.9, None, False), (9.0, 100, False)],
)
def test_common_rows_on_gpu_respect_free_memory(monkeypatch, free_sets, limit, is_worth_it):
    """And not more than the runs' rows, of which data.limit leaves few."""
    cfg = composed("model=linear", f"data.limit={'null' if limit is None else limit}")
    parts = replace(prepare(cfg, CPU), device=torch.device("cuda"))
    size = together._num_bytes(parts.source)
    monkeypatch.setattr(together, "free_bytes", lambda device: None if free_sets is None else free_sets * size)
    chosen = indices(parts.source, seed=cfg.seed, **how_to_cut(cfg))
    assert together._is_worth_it(parts, chosen) == is_worth_it

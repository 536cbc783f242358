"""Switches, precisions, threads and memory of each kind of device."""

from __future__ import annotations

import os
import re
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from runner.device import backends, host_memory
from runner.device.precision import make_precision, precision_note, set_float32


@pytest.mark.parametrize(
    "words",
    [
        "CUDA error: out of memory",
        "CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "GET was unable to find an engine to execute this computation",
        "NCCL error: Cuda failure 'out of memory'",
        "MPS backend out of memory (MPS allocated: 1 GB)",
        "Invalid buffer size: 12.00 GiB",
    ],
)
def test_every_librarys_words_for_no_memory(words):
    assert backends.is_out_of_memory(RuntimeError(words))
    assert not backends.is_out_of_memory(ValueError(words))
    assert not backends.is_out_of_memory(RuntimeError("CUDA error: an illegal memory access was encountered"))


def test_precision_computes_in_its_type():
    for name, dtype in (("fp32", torch.float32), ("bf16", torch.bfloat16), ("fp16", torch.float16)):
        with make_precision(name, device=torch.device("cpu")).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype


@pytest.fixture
def fake_cuda(monkeypatch):
    """Record the calls of set_switches() to torch.cuda."""
    asked = []
    for name in ("set_device", "set_per_process_memory_fraction", "reset_peak_memory_stats"):
        monkeypatch.setattr(torch.cuda, name, lambda *given, name=name: asked.append((name, *given)))
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "")  # so that it is removed afterwards
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    yield asked
    backends.set_switches(torch.device("cpu"), precision="fp32", deterministic=False)


def test_a_deterministic_run_may_follow_another(fake_cuda, monkeypatch):
    """torch reads the variable once per process, at its first product."""
    backends.set_switches(torch.device("cuda:1"), precision="fp32", deterministic=False)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    backends.set_switches(torch.device("cuda:1"), precision="fp32", deterministic=True)
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"  # the user's value
    assert torch.are_deterministic_algorithms_enabled() and torch.backends.cudnn.deterministic
    backends.set_switches(torch.device("cuda:1"), precision="fp32", deterministic=False)
    assert not torch.are_deterministic_algorithms_enabled() and not torch.backends.cudnn.deterministic


def test_use_in_thread_sets_the_gpu(monkeypatch):
    devices = []
    monkeypatch.setattr(torch.accelerator, "set_device_index", devices.append)
    for name in ("cuda:1", "cpu", "mps"):
        backends.use_in_thread(torch.device(name))
    assert devices == [torch.device("cuda:1")]


@pytest.mark.parametrize(("available", "fraction", "free"), [(64, None, 38), (64, 0.5, 14), (20, None, 20)])
def test_a_macs_memory_is_the_whole_machines(available, fraction, free, monkeypatch):
    gib = 2**30
    monkeypatch.setattr(torch.mps, "recommended_max_memory", lambda: 48 * gib)
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 10 * gib)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=available * gib))
    assert backends.free_memory_bytes(torch.device("mps"), memory_fraction=fraction) == free * gib


@pytest.mark.parametrize(
    ("num_processes", "fraction", "free"), [(1, None, 40), (4, None, 10), (4, 0.1, 8), (2, 0.5, 20)]
)
def test_processes_sharing_gpu_get_equal_memory(num_processes, fraction, free, monkeypatch):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (30, 80))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 15)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5)  # 10 bytes are cached
    monkeypatch.setattr(host_memory, "_num_processes", 1)  # restored after the test
    host_memory.share(num_processes)
    assert backends.free_memory_bytes(torch.device("cuda"), memory_fraction=fraction) == free


def test_a_peak_says_whose_it_is(monkeypatch):
    """MPS has no peak: it is the memory in use at the end."""
    monkeypatch.setattr(torch.mps, "driver_allocated_memory", lambda: 7)
    monkeypatch.setattr(torch.accelerator, "max_memory_allocated", lambda device: 8)
    assert backends.peak_memory(torch.device("mps")) == (7, "driver, at the end")
    assert backends.peak_memory(torch.device("cuda:1")) == (8, "allocator, at most")
    peak, whose = backends.peak_memory(torch.device("cpu"))
    assert peak > 10_000_000 and whose == "process, at most"


def test_memory_fraction_on_mac_is_per_run(monkeypatch):
    header = Path(torch.__file__).parent / "include/ATen/mps/MPSAllocator.h"
    (usual,) = re.findall(r"default_high_watermark_ratio = ([\d.]+)", header.read_text())
    taken = []
    monkeypatch.delenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", raising=False)
    monkeypatch.setattr(torch.mps, "set_per_process_memory_fraction", taken.append)
    for fraction in (0.5, None):
        backends.set_switches(torch.device("mps"), precision="fp32", deterministic=False, memory_fraction=fraction)
    monkeypatch.setenv("PYTORCH_MPS_HIGH_WATERMARK_RATIO", "0.0")  # from a user who wants no limit
    backends.set_switches(torch.device("mps"), precision="fp32", deterministic=False)
    assert taken == [0.5, float(usual), 0.0]


def test_mac_counts_only_fast_cores(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    monkeypatch.setattr(backends, "THREADS", 4)
    assert backends.automatic_threads() == 3
    monkeypatch.setattr(backends.sys, "platform", "darwin")
    monkeypatch.setattr(backends.platform, "machine", lambda: "arm64")
    assert (backends.automatic_threads(), backends.automatic_threads(2)) == (4, 2)


@pytest.mark.parametrize(
    ("kind", "precision", "capability", "cudnn_tf32", "setting"),
    [
        ("cuda", "fp32", (8, 0), True, "backends.cuda.cudnn_tf32=false"),
        ("cuda", "fp32", (8, 0), False, "does not use the tensor cores; train.precision=tf32"),
        ("cuda", "fp32", (7, 5), True, ""),
        ("cuda", "tf32", (9, 0), True, "train.precision=fp32"),
        ("cuda", "bf16", (9, 0), True, ""),
        ("cpu", "fp32", None, True, ""),
    ],
)
def test_precision_note_names_the_setting(kind, precision, capability, cudnn_tf32, setting, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", cudnn_tf32)
    note = precision_note(torch.device(kind), precision)
    assert setting in note and bool(note) is bool(setting)


@pytest.mark.parametrize(
    ("precision", "cudnn_tf32", "expected"),
    [("fp32", True, (False, True)), ("fp32", False, (False, False)), ("tf32", False, (True, True))],
)
def test_switches_allow_tf32_by_precision(precision, cudnn_tf32, expected, fake_cuda):
    backends.set_switches(torch.device("cuda:0"), precision=precision, deterministic=False, cudnn_tf32=cudnn_tf32)
    assert (torch.backends.cuda.matmul.allow_tf32, torch.backends.cudnn.allow_tf32) == expected


TF32_BY_BACKEND = ["cudnn.conv", "cudnn.rnn", "cudnn", "cuda.matmul", "mkldnn"]


@pytest.mark.parametrize("key", ["", *TF32_BY_BACKEND])
@pytest.mark.parametrize("is_tf32", [False, True])
def test_set_float32_overrides_a_modules_settings(key, is_tf32):
    """torch's two interfaces agree afterwards: otherwise their getters raise, and Inductor and torch.export call them."""
    at = torch.backends
    try:
        for word in filter(None, key.split(".")):
            at = getattr(at, word)
        at.fp32_precision = "ieee" if is_tf32 else "tf32"
        set_float32(has_tf32_products=is_tf32, has_tf32_cudnn=is_tf32)
        with torch.backends.cudnn.flags():  # like torch.export: the restored values are the same
            pass
        assert torch.get_float32_matmul_precision() == ("high" if is_tf32 else "highest")
        assert torch.backends.cudnn.allow_tf32 is torch.backends.cuda.matmul.allow_tf32 is is_tf32
        cudnn, cuda = torch.backends.cudnn, torch.backends.cuda
        for operation in (cudnn.conv, cudnn.rnn, cuda.matmul):
            assert (operation.fp32_precision == "tf32") is is_tf32
        assert torch.backends.fp32_precision == cudnn.fp32_precision == torch.backends.mkldnn.fp32_precision == "none"
    finally:
        set_float32(has_tf32_products=False, has_tf32_cudnn=True)  # torch's default

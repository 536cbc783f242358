"""Lists what each kind of device lacks, computes slowly or gets wrong."""

from __future__ import annotations

import functools
import re
from pathlib import Path

import torch

#: kinds of device without 64-bit floats, and the types used instead (pytorch#122602)
NO_FLOAT64 = ("mps",)
NARROWER = {torch.float64: torch.float32, torch.complex128: torch.complex64}
#: kinds of device without asynchronous copies: towards MPS they are silently wrong (pytorch#83015, #189690)
ONLY_BLOCKING = ("cpu", "mps")
#: size of a tensor from which the process aborts: "total bytes of NDArray > 2**32" (pytorch#149325)
TOO_LARGE_BYTES = {"mps": 2**32}
#: slow types of a kind of device, and the help. float16 is slow on a CPU too, but used only with train.precision=fp16
SLOW_TYPES = {
    "cuda": {torch.float64: "float32 (float64 takes 2 to 64 times as long)", torch.complex128: "complex64"},
    "xpu": {torch.float64: "float32", torch.complex128: "complex64"},
}
#: TORCH_LIBRARY_IMPL(aten, MPS) in MPSFallback.mm: these always run on the CPU there
MPS_FALLBACKS = {"embedding_renorm_", "linalg_svd", "linalg_svd.U", "_linalg_svd", "col2im", "upsample_nearest3d.vec"}
#: kernels that read a value where no mode sees it, by kind of device
KERNELS_THAT_READ_INSIDE = {"mps": ("multinomial",)}


def supports_float64(device: torch.device) -> bool:
    return device.type not in NO_FLOAT64


def legal_dtype(dtype: torch.dtype, device: torch.device) -> torch.dtype:
    """Return `dtype`, or a narrower one if the device does not have it."""
    return dtype if supports_float64(device) else NARROWER.get(dtype, dtype)


@functools.cache
def has_mps_kernel(name: str) -> bool:
    """Return whether MPS has a kernel for mm, add.Tensor, ...; True also for composed and for unlisted operations."""
    keys = _kernel_table().get(name)
    return keys is None or name in MPS_FALLBACKS or any(key == "MPS" or "Composite" in key for key in keys)


@functools.cache
def _kernel_table() -> dict[str, set[str]]:
    """Read dispatch keys by operation from torch's native_functions.yaml; by patterns, since a YAML parser takes seconds."""
    import torchgen  # type: ignore[import-untyped]

    path = Path(str(torchgen.__file__)).parent / "packaged/ATen/native/native_functions.yaml"
    table: dict[str, set[str]] = {}
    delegates: dict[str, str] = {}
    for entry in re.split(r"^- func: ", path.read_text(encoding="utf-8"), flags=re.MULTILINE)[1:]:
        name = entry[: entry.index("(")]
        dispatch = re.search(r"^  dispatch:\n((?:    .*\n|\s*#.*\n)+)", entry, flags=re.MULTILINE)
        delegate = re.search(r"^  structured_delegate: (\S+)", entry, flags=re.MULTILINE)
        table[name] = set(re.findall(r"(\w+)(?=[\w, ]*:)", dispatch[1])) if dispatch else set()
        if delegate:
            delegates[name] = delegate[1]
        elif not dispatch:
            table[name] = {"CompositeImplicitAutograd"}
    return {name: keys | table.get(delegates.get(name, ""), set()) for name, keys in table.items()}

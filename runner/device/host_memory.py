"""Says how many bytes this process may still take, by machine, container and its own limits; writes sizes as people read them.

For snapshots of checkpoints, tables in memory, and how many models train together. And has a training keep what it frees.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from pathlib import Path

#: of the container that the process runs in, by version 2 and 1 of control groups
GROUPS = (
    (Path("/sys/fs/cgroup/memory.max"), Path("/sys/fs/cgroup/memory.current")),
    (Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"), Path("/sys/fs/cgroup/memory/memory.usage_in_bytes")),
)

#: glibc's names of what mallopt() sets (malloc.h), and from which size on a piece of memory is the system's own
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**30

_num_processes = 1


def share(num_processes: int) -> None:
    """Says that this process is one of so many that take the machine's memory alike."""
    global _num_processes
    _num_processes = num_processes


def memory_left() -> tuple[int, str]:
    """Bytes, and what holds them to that."""
    import psutil

    left = [(int(psutil.virtual_memory().available), "free")]
    for most, now in GROUPS:
        try:
            left.append((int(most.read_text()) - int(now.read_text()), "left to this container"))
        except (OSError, ValueError):  # no such group, or "max"
            continue
    left = [(free // _num_processes, why) for free, why in left]
    try:
        import resource  # not on Windows
    except ImportError:
        return min(left)
    sizes = _sizes()
    for limit, now_bytes, name in (
        (resource.RLIMIT_DATA, sizes.get("VmData", 0), "ulimit -d"),
        (resource.RLIMIT_AS, sizes.get("VmSize", 0), "ulimit -v"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left.append((max(0, soft - now_bytes), f"left by {name}"))
    return min(left)


@functools.cache
def keep_what_is_freed() -> None:
    """Has the C library keep the memory that a step frees for the next one, from now on: once data are read.

    glibc gives the end of its memory back to the system whenever it is free, after each backward pass, and gets it again
    page by page: of a CNN's step of 16 ms 4 ms (digits, batch 128, 2 cores, 2026-11). The process stays as large as it was
    at most. Other C libraries (macOS, musl) are left as they are.
    """
    with suppress(OSError, TypeError, AttributeError):  # no such function, or no library to ask by no name
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(TRIM_THRESHOLD, -1)


def _sizes() -> dict[str, int]:
    """Of this process by Linux's names, in bytes; {} elsewhere."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines if line.endswith("kB"))
    return {name.rstrip(":"): int(count) * 1024 for name, count, _ in parts}


def size_in_words(num_bytes: float) -> str:
    """12.3 GiB"""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}" if num_bytes < 1000 * unit else f"{num_bytes / unit:,.0f} {name}"
    return f"{num_bytes / 2**10:.3g} KiB"

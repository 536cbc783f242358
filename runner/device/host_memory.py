"""Finds how many bytes this process may still take, by machine, container and its own limits; formats sizes."""

from __future__ import annotations

import ctypes
import functools
import resource
from contextlib import suppress
from pathlib import Path

#: Linux's control groups, and those of this process
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: by version 2 and 1: a group's limit, its usage, and the part of it that is cached files (memory.stat)
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

#: glibc's parameters of mallopt() (malloc.h), and the size from which a block is mapped separately
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**30
#: rows in memory take this many times their size: the splits are copies, and so is each chunk that is read
COPIES = 2.5

_num_processes = 1


def share(num_processes: int) -> None:
    """Divide the memory of the machine, and of its GPU, among this number of processes."""
    global _num_processes
    _num_processes = num_processes


def is_shared() -> bool:
    return _num_processes > 1


def own_part(num_bytes: int) -> int:
    return num_bytes // _num_processes


def memory_left() -> tuple[int, str]:
    """Return bytes, and what limits them."""
    import psutil

    limits = [(int(psutil.virtual_memory().available), "free"), *left_in_groups(GROUPS, OWN_GROUPS)]
    left = [(own_part(free), why) for free, why in limits]
    sizes = _sizes()
    for limit, now_bytes, name in (
        (resource.RLIMIT_DATA, sizes.get("VmData", 0), "ulimit -d"),
        (resource.RLIMIT_AS, sizes.get("VmSize", 0), "ulimit -v"),
    ):
        soft, _ = resource.getrlimit(limit)
        if soft != resource.RLIM_INFINITY:
            left.append((max(0, soft - now_bytes), f"left by {name}"))
    return min(left)


def fits_in_memory(num_bytes: int) -> tuple[bool, str]:
    """Return whether rows of this size may be kept in memory, with their copies in half of what is left, and why."""
    left, limit = memory_left()
    fits = num_bytes * COPIES <= left / 2
    return fits, f"auto: {num_bytes / 2**20:,.1f} MiB of rows, {left / 2**20:,.0f} MiB {limit}"


def left_in_groups(mount: Path, own: Path) -> list[tuple[int, str]]:
    """Return the free bytes of each limited control group of this process, with its name.

    A container sees its own group as the top; a job of Slurm is in several nested groups.
    """
    paths = {mount: "", mount / "memory": ""}
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths[mount / "memory" if controllers else mount] = path
    limits = []
    for top, path in paths.items():
        names = [] if ".." in path.split("/") else path.strip("/").split("/")  # "..": its group is not visible here
        for group in dict.fromkeys(top.joinpath(*names[:count]) for count in range(len(names) + 1)):
            if (left := _left_in(group)) is not None:
                limits.append(
                    (left, "left to this container" if group == top else f"left by control group {group.name}")
                )
    return limits


def _left_in(group: Path) -> int | None:
    for most, now, cached in FILES:
        try:
            limit, taken = int((group / most).read_text()), int((group / now).read_text())
        except (OSError, ValueError):  # "max"
            continue
        with suppress(OSError, ValueError):  # cached files count as usage, and are dropped when memory is needed
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken -= int(stat.get(cached, 0))
        return max(0, limit - max(0, taken))
    return None


@functools.cache
def keep_what_is_freed() -> None:
    """Make glibc keep the memory that a step frees for the next step; other C libraries stay as they are.

    By default it returns free memory after each backward pass and gets it again page by page. The process keeps its
    largest size.
    """
    with suppress(OSError, TypeError, AttributeError):  # another C library
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(MMAP_THRESHOLD, LARGEST_KEPT)
        mallopt(TRIM_THRESHOLD, -1)


def _sizes() -> dict[str, int]:
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:
        return {}
    parts = (line.split() for line in lines if line.endswith("kB"))
    return {name.rstrip(":"): int(count) * 1024 for name, count, _ in parts}


def size_in_words(num_bytes: float) -> str:
    """Format a size: 12.3 GiB."""
    for unit, name in ((2**40, "TiB"), (2**30, "GiB"), (2**20, "MiB")):
        if num_bytes >= unit:
            return f"{num_bytes / unit:.3g} {name}" if num_bytes < 1000 * unit else f"{num_bytes / unit:,.0f} {name}"
    return f"{num_bytes / 2**10:.3g} KiB"

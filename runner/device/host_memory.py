"""Says how many bytes this process may still take, by machine, container and its own limits; writes sizes as people read them.

For snapshots of checkpoints, tables in memory, and how many models train together. And has a training keep what it frees.
"""

from __future__ import annotations

import ctypes
import functools
from contextlib import suppress
from pathlib import Path

#: where Linux has its control groups, and which of them the process is in
GROUPS, OWN_GROUPS = Path("/sys/fs/cgroup"), Path("/proc/self/cgroup")
#: by version 2 and 1 of them: a group's limit, what it has taken, and what of that is cached files (memory.stat)
FILES = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)

#: glibc's names of what mallopt() sets (malloc.h), and from which size on a piece of memory is the system's own
TRIM_THRESHOLD, MMAP_THRESHOLD = -1, -3
LARGEST_KEPT = 2**30

_num_processes = 1


def share(num_processes: int) -> None:
    """Says that this process is one of so many that take the machine's memory alike, and that of their GPU."""
    global _num_processes
    _num_processes = num_processes


def is_shared() -> bool:
    """Whether others take it, too."""
    return _num_processes > 1


def own_part(num_bytes: int) -> int:
    """Of memory that is shared so."""
    return num_bytes // _num_processes


def memory_left() -> tuple[int, str]:
    """Bytes, and what holds them to that."""
    import psutil

    left = [(int(psutil.virtual_memory().available), "free"), *left_in_groups(GROUPS, OWN_GROUPS)]
    left = [(own_part(free), why) for free, why in left]
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


def left_in_groups(mount: Path, own: Path) -> list[tuple[int, str]]:
    """Bytes, and whose they are, of each control group with a limit that the process is in: the container's, which is all
    that a container sees, and those below it, one in the other, as a job of Slurm has them."""
    paths = {mount: "", mount / "memory": ""}
    with suppress(OSError):
        for line in own.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "memory" in controllers.split(","):
                paths[mount / "memory" if controllers else mount] = path
    found = []
    for top, path in paths.items():
        names = [name for name in path.split("/") if name]
        if ".." in names:  # the process is in a group outside of what is seen here
            names = []
        for group in (top.joinpath(*names[:count]) for count in range(len(names) + 1)):
            if (left := _left_in(group)) is not None:
                found.append(
                    (left, "left to this container" if group == top else f"left by control group {group.name}")
                )
    return found


def _left_in(group: Path) -> int | None:
    for most, now, cached in FILES:
        try:
            limit, taken = int((group / most).read_text()), int((group / now).read_text())
        except (OSError, ValueError):  # "max"
            continue
        with suppress(OSError, ValueError):  # files that were read count as taken, and go when memory is asked for
            stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
            taken -= int(stat.get(cached, 0))
        return max(0, limit - max(0, taken))
    return None


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

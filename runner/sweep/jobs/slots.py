"""The slots of a machine (sweep.slots), which of them a job may use, and the environment of a job in a slot.

For launchers/local.py, which has the list of free ones, and launchers/slurm.py.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.device import Choice, Hardware, resolve
from runner.device.choose import explained
from runner.device.unavailable import why_not

#: free memory for each process that trains a group of jobs on the CPU
GROUP_BYTES = 2**30
#: maximum number of such processes on one GPU; the free memory that each one needs, on the GPU (including its data) and on the host
MOST_ON_GPU, GPU_BYTES, HOST_BYTES = 4, 8 * 2**30, 4 * 2**30
#: minimum number of jobs in each of several groups on one GPU: with fewer jobs, kernels are short, and more processes add more short
#: kernels (an estimate, not measured on a GPU)
FEWEST_ON_GPU = 16
#: from a policy and this machine to the devices that a job may use where it runs
DevicesFor = Callable[[tuple[str, ...], Hardware], tuple[str, ...]]


@dataclass(frozen=True)
class Slot:
    """A slot of a device; one job at a time runs in it."""

    device: str  # cpu, cuda:1, mps, xpu:0
    number: int = 0  # among the slots of its device
    for_groups: bool = False  # whether jobs that are trained together may take it, and no others

    @property
    def kind(self) -> str:
        return self.device.partition(":")[0]

    def __str__(self) -> str:
        return self.device if self.number == 0 else f"{self.device} ({self.number + 1})"


def places(hardware: Hardware, slots: Mapping[str, int], *, groups: Mapping[str, int] | None = None) -> list[Slot]:
    """Return the slots of the machine: devices with the most free memory first, the CPU last; then slots only for groups.

    groups: How many groups of jobs may share each device, see groups_of().
    """
    usable = [name for name in hardware.devices() if name == "cpu" or why_not(name, hardware) is None]
    devices = hardware.devices()
    usable.sort(key=lambda name: (name == "cpu", -(devices[name].free_bytes or 0)))
    most = max((slots.get(_kind(name), 1) for name in usable), default=0)
    # first slots first: jobs spread over the devices before two share one
    found = [Slot(name, number) for number in range(most) for name in usable if number < slots.get(_kind(name), 1)]
    groups = groups or {}
    more = range(max(groups.values(), default=0))
    return found + [
        Slot(name, number, for_groups=True)
        for number in more
        for name in usable
        if slots.get(_kind(name), 1) <= number < groups.get(name, 0)
    ]


def devices_for(policy: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """Return the devices that a job with this policy may use.

    Raises:
        RunnerError: If no such device is available, with the reason.
    """
    hardware = explained(policy, hardware)
    first = resolve(policy, hardware).device  # the first available device of a preference list decides the kind
    asked = next(item for item in policy if item in ("auto", "all") or _kind(item) == _kind(first))
    if ":" in asked or asked in ("cpu", "mps"):
        return (first,)
    return tuple(name for name in hardware.devices() if _kind(name) == _kind(first) and why_not(name, hardware) is None)


def anywhere(policy: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """Return the devices on another machine: the job reports a missing one."""
    return ()


def pick(
    devices: Iterable[str],
    free: Iterable[Slot],
    busy: Collection[Slot],
    *,
    is_group: bool = False,
    alone: Collection[str] = (),
) -> Slot | None:
    """Return the free slot for a job: on the device with the fewest jobs, and of those the one with the most memory.

    A single job takes the GPU memory that it needs, and a group its share: they don't share a GPU unless slots are set.

    Args:
        is_group: Whether the job is a group.
        alone: Devices that run a single job.
    """
    jobs, wanted = Counter(place.device for place in busy), set(devices)
    shared = {place.device for place in busy if place.for_groups and place.kind != "cpu"}

    def fits(place: Slot) -> bool:
        if place.for_groups:
            return is_group and (place.kind == "cpu" or place.device not in alone)
        return is_group or place.device not in shared

    fitting = [place for place in free if place.device in wanted and fits(place)]
    return min(fitting, key=lambda place: jobs[place.device], default=None)  # min keeps the order of `free`


def choice_at(place: Slot, policy: tuple[str, ...]) -> Choice:
    """Return the device of a job in a slot. A process that sees one GPU calls it cuda:0."""
    automatic = f"{policy[0]}: the sweep's free slot with the fewest jobs and the most free memory"
    reason = "as asked" if place.device in policy else automatic
    return Choice(place.device, reason, "cuda:0" if place.kind == "cuda" else place.device)


def environment_of(place: Slot, *, visible: str | None) -> dict[str, str]:
    """Return the environment of a job in a slot. visible: CUDA_VISIBLE_DEVICES of the sweep."""
    if place.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # a query would create a context of about 400 MB on a GPU
    if place.kind != "cuda":
        return {}
    index = int(place.device.partition(":")[2])
    seen = [word.strip() for word in visible.split(",")] if visible else []
    return {"CUDA_VISIBLE_DEVICES": seen[index] if seen else str(index)}


def taking_turns(order: Iterable[Slot], *, pipes: Path) -> str:
    """Return a hint if jobs or groups share an NVIDIA GPU without NVIDIA's MPS, else "". pipes: MPS's directory."""
    if not any(place.kind == "cuda" and place.number for place in order) or (pipes / "control").exists():
        return ""
    return "; jobs on one GPU take turns: nvidia-cuda-mps-control -d, before the sweep, lets them overlap"


def threads_of(slots: Mapping[str, int], *, num_cpus: int) -> int | None:
    """Return the CPU threads of each job, so that slots don't compete; None for a single slot."""
    return max(1, num_cpus // slots["cpu"]) if slots["cpu"] > 1 else None


def groups_of(
    hardware: Hardware, slots: Mapping[str, int], *, num_cpus: int, num_threads: int | None, free_bytes: int
) -> dict[str, int]:
    """Return how many groups of jobs may compute on each device at a time.

    On the CPU, one per core, since a group rarely uses two. On a GPU, several if there are cores, as small models leave it
    idle while a process creates its members' directories and journals. With several slots, as many as slots.

    Args:
        num_threads: CPU threads of each group, if set.
        free_bytes: Free host memory.
    """

    def unless_said(kind: str, most: int) -> int:
        return slots[kind] if slots[kind] > 1 else max(1, most)

    found = {"cpu": unless_said("cpu", min(num_cpus // (num_threads or 1), free_bytes // GROUP_BYTES))}
    of_each = min(num_cpus, free_bytes // HOST_BYTES) // max(1, len(hardware.cuda))
    for index, gpu in enumerate(hardware.cuda):
        room = 0 if gpu.is_exclusive else (gpu.free_bytes or 0) // GPU_BYTES
        found[f"cuda:{index}"] = unless_said("cuda", min(MOST_ON_GPU, of_each, room))
    return found


def num_groups(order: Iterable[Slot], devices: Collection[str], num_jobs: int) -> int:
    """Return how many groups of `num_jobs` jobs may compute at a time on these devices."""
    fitting = [place for place in order if place.device in devices]
    without_others = [place for place in fitting if place.kind == "cpu" or not place.for_groups]
    return max(len(without_others), min(len(fitting), num_jobs // FEWEST_ON_GPU))


def _kind(device: str) -> str:
    return device.partition(":")[0]

"""Says which places for jobs a machine has (sweep.slots), which of them a job may take, and what it sees there.

For launchers/local.py, which keeps the free ones, and launchers/slurm.py. Pure, but for a look at one path.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from runner.device import Choice, Hardware, resolve
from runner.device.choose import explained
from runner.device.unavailable import why_not

#: of free memory, for each process that trains a group of jobs on the CPU
GROUP_BYTES = 2**30
#: such processes on one GPU at the most; what each has to have of its free memory, in a part of which its data lies, too, and of
#: the machine's
MOST_ON_GPU, GPU_BYTES, HOST_BYTES = 4, 8 * 2**30, 4 * 2**30
#: jobs of each of several groups on one GPU, at the least: of fewer the kernels are short, and several processes bring more of them
#: (reasoned, not measured on a GPU)
FEWEST_ON_GPU = 16
#: a policy and the machine that asks → the devices that a job may take where it runs
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
    """Every slot of the machine: the devices with the most free memory first, the CPU last; then those for groups alone.

    groups: of jobs that are trained together, how many may share each device, see groups_of().
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
    """The devices that a job with this policy may take; where `device=` leaves a choice, all that it could choose.

    Raises: RunnerError when none of them is there, with the reason.
    """
    hardware = explained(policy, hardware)
    first = resolve(policy, hardware).device  # the first of a preference list that is there decides the kind
    asked = next(item for item in policy if item in ("auto", "all") or _kind(item) == _kind(first))
    if ":" in asked or asked in ("cpu", "mps"):
        return (first,)
    return tuple(name for name in hardware.devices() if _kind(name) == _kind(first) and why_not(name, hardware) is None)


def anywhere(policy: tuple[str, ...], hardware: Hardware) -> tuple[str, ...]:
    """The devices of a machine that nobody sees from here: the job says when its own is missing."""
    return ()


def pick(
    devices: Iterable[str],
    free: Iterable[Slot],
    busy: Collection[Slot],
    *,
    is_group: bool = False,
    alone: Collection[str] = (),
) -> Slot | None:
    """The free place that a job takes: on the device with the fewest jobs, of those the one with the most memory.

    is_group: whether it is several that are trained together. alone: devices with a job that is none. That one takes what it
    needs of a GPU's memory, and each of several groups its part: neither joins the other where nobody has asked for slots.
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
    """The device of a job in its place. A process that is given one GPU calls it cuda:0."""
    automatic = f"{policy[0]}: the sweep's free slot with the fewest jobs and the most free memory"
    reason = "as asked" if place.device in policy else automatic
    return Choice(place.device, reason, "cuda:0" if place.kind == "cuda" else place.device)


def environment_of(place: Slot, *, visible: str | None) -> dict[str, str]:
    """What a job in this place sees of the machine.

    visible: CUDA_VISIBLE_DEVICES as it is here, which numbers the GPUs that the sweep sees.
    """
    if place.kind == "cpu":
        return {"CUDA_VISIBLE_DEVICES": ""}  # a look at a GPU would make a context of some 400 MB on it
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
    """Threads of each job on the CPU, so that slots don't fight; None leaves a lone job to itself."""
    return max(1, num_cpus // slots["cpu"]) if slots["cpu"] > 1 else None


def groups_of(
    hardware: Hardware, slots: Mapping[str, int], *, num_cpus: int, num_threads: int | None, free_bytes: int
) -> dict[str, int]:
    """How many groups of jobs that are trained together may compute on each device at a time, by its name.

    On the CPU one for each core, since a group fills one and hardly ever two. On a GPU some as well, where there are cores
    for them: small models leave it idle while one process makes its members' folders and journals, one after the other. Of
    64 digits MLPs on an H100 that took 30 s, and their training 4 (2026-11). Where there are several slots, as many.
    num_threads: of each on the CPU, where somebody has said it. free_bytes: of the machine's memory.
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
    """How many groups of so many jobs may compute at a time, where they may take these devices."""
    fitting = [place for place in order if place.device in devices]
    without_others = [place for place in fitting if place.kind == "cpu" or not place.for_groups]
    return max(len(without_others), min(len(fitting), num_jobs // FEWEST_ON_GPU))


def _kind(device: str) -> str:
    return device.partition(":")[0]

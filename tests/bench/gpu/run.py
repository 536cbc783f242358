"""Run the GPU checks on a machine without a network: `python tests/bench/gpu/run.py PART ... [--limit SECONDS]`.

The first call installs the packed wheels and the project into .gpu/venv. Each part has a time limit. Its output goes to
PART.txt in $OUT (default: .gpu/out) as it is produced, so that nothing is lost if the machine is taken away.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import sysconfig
import time
import venv
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[2]
PLACE = ROOT / ".gpu"
#: seconds of each part, the most important first
SECONDS = {"graphs": 60, "smoke": 120, "tests": 150, "several": 60, "groups": 190, "tables": 150, "steps": 60}
SECONDS |= {"memory": 130, "gpt": 240, "cifar": 240, "syncs": 30, "machine": 40}
PEERS = {"cpu": "limit,ours"}
EVERY_PEER = "limit,limit_graph,limit_compiled_graph,ours,ours_graph,ours_compiled_graph"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("parts", nargs="+", choices=SECONDS)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--short", action="store_true", help="tiny sizes, to try the parts on a CPU")
    parser.add_argument("--limit", type=float, default=580, help="seconds of all parts")
    given = parser.parse_args()
    if given.device != "cpu" and list(PLACE.glob("wheels/*.whl")):
        use_own_environment()
    os.environ |= {"PYTHONPATH": str(HERE), "MLFLOW_DISABLE_TELEMETRY": "true", "HF_HUB_OFFLINE": "1"}
    out = Path(os.environ.get("OUT", PLACE / "out"))
    out.mkdir(parents=True, exist_ok=True)
    end, codes = time.monotonic() + given.limit, []
    for name in given.parts:
        seconds = min(SECONDS[name], end - time.monotonic())
        if seconds < 5:
            print(f"== {name}: not run, no time left")
            continue
        began, file = time.monotonic(), out / f"{name}.txt"
        codes.append(part(name, given.device, file, is_short=given.short, seconds=seconds))
        print(f"== {name}: {time.monotonic() - began:.0f} s, exit code {codes[-1]}, {file}", flush=True)
        print("\n".join(shown(file)), flush=True)
    return max(codes, default=0)


def part(name: str, device: str, file: Path, *, is_short: bool, seconds: float) -> int:
    """Run one part; return its exit code, 124 at its time limit."""
    limit = time.monotonic() + seconds
    with file.open("w") as output:
        for command in commands(name, device, is_short=is_short):
            with leader(command, output) as process:
                try:
                    if code := process.wait(max(1.0, limit - time.monotonic())):
                        return code
                except subprocess.TimeoutExpired:
                    return 124
    return 0


@contextmanager
def leader(command: list[str], output) -> Iterator[subprocess.Popen[str]]:
    """Start a process in its own group, which ends with it."""
    process = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=output, text=True, start_new_session=True)
    try:
        yield process
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            try:
                os.killpg(process.pid, number)
                time.sleep(0.2)
            except ProcessLookupError:
                break
        process.wait()


def commands(name: str, device: str, *, is_short: bool) -> list[list[str]]:
    python = [sys.executable, "-u"]
    if name == "machine":
        devices = [*python, "-m", "runner", "devices", *([] if is_short else ["--bench"])]
        return [["nvidia-smi"], devices] if device.startswith("cuda") else [devices]
    if name == "tests":
        options = ["-v", "--tb=line", "-p", "device_tests", "-p", "no:cacheprovider", "-p", "no:benchmark"]
        if is_short:
            file = "tests/training/step/test_cuda_graphs.py"
            return [[*python, "-m", "pytest", *options, "--device", device, file, "-k", "refused"]]
        options += ["-n", "10", "--dist", "worksteal", "--timeout", "120", "--ignore", "tests/bench"]
        return [[*python, "-m", "pytest", *options, "--device", device, "tests"]]
    if name == "tables":
        peers = PEERS.get(device, EVERY_PEER)
        table = [*python, "tests/bench/table.py", "--device", device, "--repeats", "1", "--log-every", "1,0"]
        table += ["--peers", peers]
        sizes = ("mlp",) if is_short else ("mlp", "cnn", "transformer")
        return [[*table, "--size", size, "--steps", "120" if is_short else "2345"] for size in sizes]
    return [[*python, str(HERE / "parts.py"), name, "--device", device, *(["--short"] if is_short else [])]]


def shown(file: Path) -> list[str]:
    """The rows of a part's tables, failed tests, and its last lines."""
    lines = file.read_text(errors="replace").splitlines()
    rows = [line for line in lines if line.startswith("| ") or "FAILED" in line or "ERROR" in line]
    return [line[:400] for line in rows[:80] + lines[-3:]]


def use_own_environment() -> None:
    """Continue in .gpu/venv: this Python's packages, the packed wheels and the project. Created once, in about 20 s."""
    folder = PLACE / "venv"
    python = folder / "bin" / "python"
    if Path(sys.prefix) == folder:
        return
    if not (folder / "ready").exists():
        venv.create(folder, clear=True, symlinks=True)
        packages = Path(sysconfig.get_path("purelib", vars={"base": str(folder)}))
        # the packages of this Python, which may be a virtual environment
        lines = [f"import site; site.addsitedir({sysconfig.get_path(each)!r})" for each in ("purelib", "platlib")]
        (packages / "this_python.pth").write_text("\n".join(lines) + "\n")
        pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-q"]
        pip += ["--no-index", "--no-deps", "--no-cache-dir"]
        wheels = [str(wheel) for wheel in sorted(PLACE.glob("wheels/*.whl"))]
        subprocess.run([*pip, "--ignore-installed", *wheels], check=True)
        subprocess.run([*pip, "--no-build-isolation", "-e", str(ROOT)], check=True)
        (folder / "ready").touch()
    os.execv(python, [str(python), *sys.argv])


if __name__ == "__main__":
    sys.exit(main())

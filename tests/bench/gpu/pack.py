"""Pack the wheels that a GPU machine without a network needs: `python tests/bench/gpu/pack.py`, in the project's environment.

They go into .gpu/wheels/, for Python 3.12 on Linux. What such machines usually have (PRESENT) is left out; so is what no check needs.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[3]
WHEELS = ROOT / ".gpu" / "wheels"
PROJECT, EXTRAS = "torch-experiment-runner", ("cuda", "metrics", "safetensors", "search", "test", "text")
#: the packages of an image with torch for CUDA, and their requirements
PRESENT = """
accelerate botorch build einops hypothesis jax lightning matplotlib nvidia-ml-py onnx onnxruntime onnxscript opencv-python-headless
pandas peft pip psutil pyarrow pytest pytest-benchmark pytest-cov pytest-timeout pytest-xdist requests rich safetensors scikit-learn scipy
seaborn sentencepiece setuptools statsmodels tensorboard timm tokenizers torch torchaudio torchmetrics torchvision transformers triton wheel
"""
NOT_NEEDED = ["datasets", "ray", "mypy", "ruff", "import-linter", "hydra-submitit-launcher"]
MAX_BYTES = 56 * 2**20


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--python-version", default="3.12")
    given = parser.parse_args()
    environment = {"python_version": given.python_version, "sys_platform": "linux", "platform_system": "Linux"}
    environment |= {"os_name": "posix", "platform_machine": "x86_64"}
    environment |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    newer = {"transformers"}  # requires other packages than the older version in the image
    present = set(PRESENT.split()).union(*(required(name, (), environment, newer) for name in PRESENT.split()))
    needed = required(PROJECT, EXTRAS, environment, present | set(NOT_NEEDED)) - {PROJECT}
    WHEELS.mkdir(parents=True, exist_ok=True)
    for wheel in WHEELS.glob("*.whl"):
        wheel.unlink()
    lacking = []
    if not download(sorted(needed), given.python_version):  # at least one has no wheel: find out which
        lacking = [name for name in sorted(needed) if not download([name], given.python_version) and not built(name)]
    wheels = list(WHEELS.glob("*.whl"))
    size = sum(wheel.stat().st_size for wheel in wheels)
    print(f"{len(wheels)} wheels, {size / 2**20:.1f} MiB, in {WHEELS}")
    if lacking:
        print(f"warning: no wheel of {', '.join(lacking)}")
    if size > MAX_BYTES:
        sys.exit(f"error: more than {MAX_BYTES / 2**20:.0f} MiB")


def required(name: str, extras: tuple[str, ...], environment: dict[str, str], without: set[str]) -> set[str]:
    """Return the installed distributions that one requires, including itself; none if it is not installed."""
    found: set[str] = set()
    waiting = [(name, extras)]
    seen = set()
    while waiting:
        name, extras = waiting.pop()
        if (name, extras) in seen or name in without:
            continue
        seen.add((name, extras))
        try:
            lines = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add(name)
        for need in map(Requirement, lines):
            places = ({**environment, "extra": extra} for extra in ("", *extras))
            if need.marker is None or any(map(need.marker.evaluate, places)):
                waiting.append((canonicalize_name(need.name), tuple(sorted(need.extras))))
    return found


def download(names: list[str], series: str) -> bool:
    """Download wheels of the versions that are installed here; return whether every one has a wheel."""
    platforms = [f"manylinux_2_{minor}_x86_64" for minor in range(39, 4, -1)]
    platforms += ["manylinux2014_x86_64", "manylinux1_x86_64"]
    there = ["--python-version", series, "--only-binary=:all:", *(f"--platform={platform}" for platform in platforms)]
    return pip("download", names, *there, "-d", str(WHEELS)) == 0


def built(name: str) -> bool:
    """Build a wheel from source; return whether it runs with any Python."""
    pip("wheel", [name], "-w", str(WHEELS))
    made = {wheel.name for wheel in WHEELS.glob("*.whl") if canonicalize_name(wheel.name.split("-")[0]) == name}
    for wheel in made:
        if not wheel.endswith("-none-any.whl"):
            (WHEELS / wheel).unlink()
    return any(wheel.endswith("-none-any.whl") for wheel in made)


def pip(command: str, names: list[str], *options: str) -> int:
    wanted = [f"{name}=={metadata.version(name)}" for name in names]
    words = [sys.executable, "-m", "pip", "--disable-pip-version-check", command, "-q", "--no-deps", *wanted, *options]
    return subprocess.run(words, capture_output=True, check=False).returncode


if __name__ == "__main__":
    main()

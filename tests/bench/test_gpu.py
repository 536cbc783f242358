"""The GPU checks of tests/bench/gpu run on a CPU in their short form, so that a changed name breaks them here."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest

GIB = 2**30


@pytest.mark.slow
def test_parts_in_short_form_print_tables(bench, warm, device, monkeypatch, capfd):
    """In this process; the runs are forked, as new processes would load everything again."""
    parts = bench("parts")

    def start(command, *, cwd, env=None, **_):
        streams = dict.fromkeys(("stdout", "stderr"), subprocess.PIPE)
        with warm.program(command, cwd=cwd, env=env, text=True, **streams) as process:
            output, errors = process.communicate()
        return subprocess.CompletedProcess(command, process.returncode, output, errors)

    def run(words, folder, **_):
        folder.mkdir(exist_ok=True)
        done = start([sys.executable, "-m", "runner", *words, "--json"], cwd=folder)
        return done.returncode, json.loads(done.stdout)

    for name in ("OMP_NUM_THREADS", "RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "1")  # restored at the end
    monkeypatch.setattr(parts, "run", run)
    monkeypatch.setattr(parts, "subprocess", SimpleNamespace(run=start))
    monkeypatch.setattr(sys, "argv", ["parts.py", *parts.PARTS, "--short", "--device", str(device)])
    parts.main()
    said = capfd.readouterr().out
    tables = {name: said.partition(part.__doc__)[2].strip().split("\n\n")[0] for name, part in parts.PARTS.items()}
    assert "FAILED" not in said
    assert [name for name, table in tables.items() if len(table.splitlines()) < 3] == []


def test_commands_of_other_parts_are_understood(bench, monkeypatch):
    run, tables = bench("run"), bench("table")
    for command in run.commands("tables", "cpu", is_short=True):
        monkeypatch.setattr(sys, "argv", command[command.index("tests/bench/table.py") :])
        assert tables.arguments().peers == ["limit", "ours"]
    (command,) = run.commands("tests", "cpu", is_short=True)
    file, _, word = command[-3:]
    assert word in (run.ROOT / file).read_text()


def test_part_at_its_time_limit_keeps_output(bench, monkeypatch, tmp_path, capfd):
    run = bench("run")
    endless = ["sh", "-c", "echo '| a row |'; sleep 600"]
    monkeypatch.setattr(run, "commands", lambda *given, **more: [endless])
    monkeypatch.setattr(run, "PLACE", tmp_path)
    monkeypatch.setenv("OUT", str(tmp_path / "out"))
    for name in ("PYTHONPATH", "MLFLOW_DISABLE_TELEMETRY", "HF_HUB_OFFLINE"):
        monkeypatch.setenv(name, "")  # restored at the end
    monkeypatch.setitem(run.SECONDS, "smoke", 6)
    monkeypatch.setattr(sys, "argv", ["run.py", "smoke"])
    assert run.main() == 124
    assert (tmp_path / "out" / "smoke.txt").read_text() == "| a row |\n"
    assert "| a row |" in capfd.readouterr().out


DEVICES = {
    "NVIDIA A100-SXM4-80GB": (79, 312e12),
    "NVIDIA A100-SXM4-40GB": (39, 312e12),
    "NVIDIA A10": (22, 125e12),
    "NVIDIA L40S": (44, 362e12),
    "NVIDIA H100 80GB HBM3": (79, 989e12),
    "NVIDIA H200": (139, 989e12),
    "NVIDIA H100 PCIe": (79, None),
    "NVIDIA A10G": (22, None),
    "NVIDIA A100-SXM4-40GB MIG 1g.5gb": (4, None),
    "NVIDIA GeForce RTX 3090 Ti": (23, None),
}


@pytest.mark.parametrize("name", DEVICES)
def test_data_sheet_is_of_the_named_device(name, bench):
    gib, flops = DEVICES[name]
    found = bench("parts").data_sheet(name, gib * GIB)
    assert (found and found.speeds.flops_per_second["bf16"]) == flops
    assert found is None or abs(found.memory_bytes / GIB - gib) < 2

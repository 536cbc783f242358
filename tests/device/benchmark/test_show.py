"""The table, the file and the exit code of `devices --bench`."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from machine_figures import MACHINE, TINY, facts
from rich.console import Console

from runner import cli
from runner.device import probe
from runner.device.benchmark import cache, show
from runner.version import PACKAGES


@pytest.fixture(autouse=True)
def own_cache(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "100")
    return tmp_path / "runner"


@pytest.fixture
def tiny(monkeypatch):
    monkeypatch.setattr(show, "Sizes", lambda: TINY)


KEPT = {"kept": "there.json", "not_kept": None}


def test_a_row_for_each_figure_and_a_column_for_each_device():
    found = dict(show.rows(facts(), ["cuda:0", "cpu"]))
    assert found["large product, fp32, TFLOP/s"] == ["42.0 (37.8-50.4)", "0.100 (0.0900-0.120)"]
    assert found["large product, bf16, TFLOP/s"] == ["700 (630-840)", ""]
    assert found["64x64 product, fp32, us"] == ["7.00 (6.30-8.40)"] * 2
    assert found["copy to the device, pinned, GB/s"] == ["50.0 (45.0-60.0)", ""]
    assert found["copy from the device, pinned, GB/s"] == ["51.0 (45.9-61.2)", ""]
    assert found["memcpy, GB/s"] == ["", "18.0 (16.2-21.6)"]
    assert found["one launch, us"] == ["4.00 (3.60-4.80)"] * 2


@pytest.mark.parametrize(("width", "num_tables"), [(60, 3), (100, 2), (120, 1)])
def test_devices_that_do_not_fit_beside_each_other_get_a_table_of_their_own(width, num_tables):
    found = {**facts(), **KEPT}
    found["devices"]["cuda:1"] = found["devices"]["cuda:0"]
    console = Console(width=width, highlight=False, file=io.StringIO())
    show.print_bench(found, console)
    text = console.file.getvalue()
    assert sum(line.startswith("measured") for line in text.splitlines()) == num_tables
    assert all(f"{name}\n" in text or f"{name} " in text for name in ("cuda:0", "cuda:1", "cpu"))
    assert text.count("50.0 (45.0-60.0)") == 2, "no figure is cut off"
    assert text.splitlines()[-1] == "kept     there.json"


def test_what_else_is_said_stands_below():
    both = {"devices": ["cuda:0", "cuda:1"], "ratio": 1.97, "lowest": 1.9, "highest": 1.99}
    lines = show.remarks({**facts(), **KEPT, "at_once": both, "failed": {"mps": "out of memory"}})
    assert lines[0] == "mps was not measured: out of memory"
    assert lines[1] == (
        "cuda:0 and cuda:1, a large product each: at once 1.97 times (1.90-1.99) faster than one after the other"
    )
    assert "the CPU with 7 threads, as many as a run takes at most" in lines[2]
    assert (
        "the CPU with 1 thread, as many as a run takes at most"
        in show.remarks({**facts(), **KEPT, "num_threads": 1})[0]
    )


def test_it_is_measured_anew_and_kept(own_cache):
    first = show.bench(probe(), sizes=TINY)
    assert sorted(own_cache.iterdir()) == [Path(first["kept"])]
    before = cache.read(probe())
    assert before.devices.keys() == first["devices"].keys()
    second = show.bench(probe(), sizes=TINY)
    assert second["kept"] == first["kept"]
    assert cache.read(probe()) != before


def test_bench_on_busy_machine_is_not_kept(own_cache, monkeypatch):
    found = facts()
    found["devices"]["cpu"]["highest"]["launch_us"] = 51 * found["devices"]["cpu"]["lowest"]["launch_us"]
    monkeypatch.setattr(show, "measure", lambda hardware, **settings: found)
    assert show.bench(probe())["not_kept"].startswith(
        "launch_us of cpu varies from 3.60 to 184, so the machine is busy"
    )
    assert not own_cache.exists()


def test_what_can_not_be_kept_is_shown_all_the_same(tiny, tmp_path, monkeypatch, capsys):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setenv("LOCALAPPDATA", str(tmp_path / "file"))
    assert cli.main(["devices", "--bench"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("large product, fp32") for line in lines)
    assert lines[-1].startswith("not kept: ")
    assert str(tmp_path / "file") in lines[-1]


def test_the_table_follows_that_of_the_devices(tiny, capsys):
    assert cli.main(["devices", "--bench"]) == 0
    out, err = capsys.readouterr()
    assert out.index("device=auto takes") < out.index("large product, fp32, TFLOP/s")
    assert out.splitlines()[-1].startswith("kept ")
    assert err == "", "what it does now is for terminals"


def test_json_holds_both(tiny, capsys):
    assert cli.main(["devices", "--json", "--bench"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {"devices", "missing", "auto", "torch", "platform"} < found.keys()
    assert found["bench"]["devices"]["cpu"]["matmul_tflops"]["fp32"] > 0
    assert cli.main(["devices", "--json"]) == 0
    assert "bench" not in json.loads(capsys.readouterr().out)


def test_where_nothing_could_be_measured_the_exit_code_says_so(own_cache, monkeypatch, capsys):
    nothing = {**facts(), "devices": {}, "failed": {"cpu": "out of memory"}}
    monkeypatch.setattr(show, "measure", lambda hardware, **settings: nothing)
    assert cli.main(["devices", "--bench"]) == 1
    assert "cpu was not measured: out of memory" in capsys.readouterr().out
    assert not own_cache.exists(), "what was kept before stays"


def test_ctrl_c_ends_it_and_leaves_nothing(own_cache, monkeypatch, tiny):
    def interrupt(hardware, **settings):
        raise KeyboardInterrupt

    monkeypatch.setattr(show, "measure", interrupt)
    assert cli.main(["devices", "--bench"]) == 130
    assert not own_cache.exists()


def test_a_word_too_many_is_refused(capsys):
    assert cli.main(["devices", "--bench", "--fast"]) == 2
    text = capsys.readouterr().err
    assert "devices does not take --fast" in text
    assert "python -m runner devices [--bench]" in text


def test_the_machine_of_these_tests_is_no_real_one():
    assert cache.path(MACHINE) != cache.path(probe())


@pytest.mark.slow
def test_the_whole_of_it_on_this_machine(own_cache, tmp_path):
    path = str(PACKAGES)
    done = subprocess.run(
        [sys.executable, "-m", "runner", "devices", "--bench", "--json"],
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert done.returncode == 0 and "large product, fp32" in done.stderr
    found = json.loads(done.stdout)["bench"]
    assert found["devices"]["cpu"]["matmul_size"]["fp32"] >= 256
    assert cache.read(probe()).devices.keys() == found["devices"].keys()

import pytest

from runner import cli
from runner.cli import devices
from runner.device import Driver, Gpu, Hardware
from runner.device.hardware import GIB


def test_devices_table_gives_reasons_for_missing(capsys):
    assert cli.main(["devices"]) == 0
    text = capsys.readouterr().out
    assert "cpu" in text
    assert "device=auto takes" in text
    hardware = devices.probe()
    for kind, there in (("cuda", hardware.cuda), ("mps", hardware.mps), ("xpu", hardware.xpu)):
        assert (f"\nno {kind}: " in text) != bool(there), kind


@pytest.mark.parametrize("width", [60, 120])
def test_an_unusable_gpu_is_shown_as_such(width, capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", str(width))
    old = Gpu("GTX 1080", 8 * GIB, 8 * GIB, (6, 1))
    machine = Hardware(torch_version="2.13", cuda_build="13.0", arch_list=("sm_90",), cuda=(old,), driver=Driver())
    facts = devices.describe(machine)
    assert facts["devices"][0]["usable"] is False
    assert "compute capability 6.1" in facts["devices"][0]["why_not"]
    assert facts["auto"]["device"] == "cpu"
    devices.print_devices(facts)
    assert "not usable" in " ".join(capsys.readouterr().out.split())

"""Devices of each vendor, read through stub libraries that have the symbols and structures of theirs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from zeromon.probes.amd_smi import AmdSmi, bare_device_serial
from zeromon.probes.devices import Devices
from zeromon.snapshot.host import Device

needs_compiler = pytest.mark.skipif(not shutil.which("gcc"), reason="no C compiler for the stub")


def compiled(source: str, folder: Path, name: str) -> Path:
    made = folder / name
    command = ["gcc", "-shared", "-fPIC", "-o", str(made), str(Path(__file__).parent / source)]
    subprocess.run(command, check=True, timeout=60)
    return made


# ---- NVIDIA ----------------------------------------------------------------------------------------

_READ_TWICE = """
import json, msgspec, sys
from zeromon.probes.nvml import Nvml
probe = Nvml()
found = [probe.read("aa-bb", n, 200) for n in range(20)]
print(json.dumps({"first": msgspec.to_builtins(found[0]), "last": msgspec.to_builtins(found[-1]),
                  "link": probe.host_link("aa-bb"), "driver": probe.driver()}))
"""


def _read_by_stub(folder: Path, **variables: str) -> dict[str, Any]:
    """nvidia-ml-py loads the library by its name, so a process of its own does."""
    pytest.importorskip("pynvml")
    compiled("nvml_stub.c", folder, "libnvidia-ml.so.1")
    environment = os.environ | {"LD_LIBRARY_PATH": str(folder)} | variables
    ran = subprocess.run(
        [sys.executable, "-c", _READ_TWICE], env=environment, capture_output=True, text=True,
        timeout=120, check=True,
    )  # fmt: skip
    found: dict[str, Any] = json.loads(ran.stdout)
    return found


@needs_compiler
def test_a_device_without_gpm_has_the_pcie_rates_that_nvml_samples(tmp_path: Path) -> None:
    last = _read_by_stub(tmp_path, NO_GPM="1")["last"]
    assert last["sm_active_ratio"] is None
    assert last["pcie_receive_bytes_per_second"] == 2 << 10
    assert last["pcie_transmit_bytes_per_second"] == 1 << 10


@needs_compiler
def test_nvml_by_a_library_with_its_symbols(tmp_path: Path) -> None:
    found = _read_by_stub(tmp_path)
    first, last = found["first"], found["last"]
    assert (first["name"], first["total_bytes"], first["used_bytes"]) == ("NVIDIA H100", 80, 30)
    assert (first["own_bytes"], first["processes"], first["utilization_ratio"]) == (18, 2, 0.75)
    assert (first["power_watts"], first["energy_joules"]) == (456.0, 9.0)
    assert (first["xid"], first["ecc_errors"], first["temperature_celsius"]) == (79, 7, 61)
    assert first["throttle_reasons"] == ["power cap", "hardware thermal"]
    assert (found["driver"], found["link"][1]) == ("575.57", "PCIe 5 x16")
    # the activity is that between two samples, of which each but the last is freed
    assert first["sm_active_ratio"] is None
    assert (last["sm_active_ratio"], last["tensor_active_ratio"]) == (0.2, 0.5)
    assert last["dram_active_ratio"] is None  # this metric failed
    # PCIe between the same samples
    assert first["pcie_receive_bytes_per_second"] is None
    assert last["pcie_receive_bytes_per_second"] == 210 << 20
    assert last["pcie_transmit_bytes_per_second"] == 200 << 20


# ---- AMD -------------------------------------------------------------------------------------------


class LinkType(IntEnum):
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2


class Smi:
    """As much of amdsmi 7.0 as is read: its names, and dictionaries with its keys."""

    class AmdSmiException(Exception):
        pass

    AmdSmiMemoryType = SimpleNamespace(VRAM="vram")
    AmdSmiTemperatureType = SimpleNamespace(HOTSPOT="hotspot")
    AmdSmiTemperatureMetric = SimpleNamespace(CURRENT="current")
    AmdSmiLinkType = LinkType
    told: ClassVar[dict[str, Any]] = {
        "amdsmi_get_gpu_asic_info": {"market_name": "MI300X", "asic_serial": "0x30ABCDEF01234567"},
        "amdsmi_get_gpu_activity": {"gfx_activity": 42, "umc_activity": "N/A"},
        "amdsmi_get_power_info": {"socket_power": "N/A", "current_socket_power": 700,
                                  "average_socket_power": "N/A"},
        "amdsmi_get_energy_count": {"energy_accumulator": 2_000_000, "counter_resolution": 15.0},
        "amdsmi_get_gpu_total_ecc_count": {"uncorrectable_count": 3},
        "amdsmi_get_gpu_metrics_info": {"indep_throttle_status": "N/A", "throttle_status": True},
        "amdsmi_get_gpu_driver_info": {"driver_version": "6.12"},
        "amdsmi_get_pcie_info": {"pcie_static": {"pcie_interface_version": 5, "max_pcie_width": 16}},
        "amdsmi_get_gpu_process_list": [{"pid": 9, "memory_usage": {"vram_mem": 11}}],
        "amdsmi_get_link_metrics": {"links": [
            {"link_type": LinkType.AMDSMI_LINK_TYPE_XGMI, "max_bandwidth": 512} for _ in range(7)
        ]},
    }  # fmt: skip

    def amdsmi_init(self) -> None:
        pass

    def amdsmi_get_processor_handles(self) -> list[str]:
        return ["handle"]

    def amdsmi_get_gpu_memory_usage(self, handle: str, kind: str) -> int:
        return 60

    def amdsmi_get_gpu_memory_total(self, handle: str, kind: str) -> int:
        return 192

    def amdsmi_get_temp_metric(self, handle: str, sensor: str, metric: str) -> int:
        return 66

    def __getattr__(self, name: str) -> Any:
        if name not in self.told:
            raise AttributeError(name)
        return lambda handle: self.told[name]


def test_amd_smi_by_the_uuid_of_torch() -> None:
    """HIP's UUID is the text of the serial, of which torch prints the bytes."""
    spelled = b"30abcdef01234567".hex()
    uuid = "-".join((spelled[:8], spelled[8:12], spelled[12:16], spelled[16:20], spelled[20:]))
    assert bare_device_serial(uuid) == bare_device_serial("0x30ABCDEF01234567") == "30abcdef01234567"
    probe = AmdSmi(Smi())
    assert probe.read(uuid, 0, 9) == Device(
        name="MI300X", used_bytes=60, total_bytes=192, own_bytes=11, utilization_ratio=0.42,
        power_watts=700, energy_joules=30.0, temperature_celsius=66, ecc_errors=3,
        throttle_reasons=("a cause that AMD SMI does not name",),
    )  # fmt: skip
    assert probe.links(uuid) == (pytest.approx(448e9), "7 XGMI links")
    assert probe.host_link(uuid)[1] == "PCIe 5 x16"
    assert (probe.driver(), probe.read("GPU-1", 0)) == ("6.12", None)


def test_a_figure_that_a_device_does_not_have_is_unknown() -> None:
    class Less(Smi):
        told: ClassVar[dict[str, Any]] = {
            "amdsmi_get_gpu_asic_info": Smi.told["amdsmi_get_gpu_asic_info"]
        }

        def amdsmi_get_gpu_memory_usage(self, handle: str, kind: str) -> int:
            raise self.AmdSmiException

    device = AmdSmi(Less()).read("0x30abcdef01234567", 0)
    assert device == Device(name="MI300X", total_bytes=192, temperature_celsius=66)


# ---- all -------------------------------------------------------------------------------------------


def test_the_vendor_that_lists_a_device_is_asked() -> None:
    devices = Devices(AmdSmi(None), AmdSmi(Smi()))
    (uuid,) = devices.uuids()
    device = devices.read(uuid, 0)
    assert device is not None and device.name == "MI300X"
    assert devices.links(uuid)[1] == "7 XGMI links"
    assert (devices.driver(), devices.read("", 0), devices.read("other", 0)) == ("6.12", None, None)
    assert devices.host_link("other") == (None, "")

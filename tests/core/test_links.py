"""What links can do at most: adapters from sysfs, NVLink and PCIe from NVML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from zeromon.device import Nvml
from zeromon.links import network_peak


def write(folder: Path, **files: str) -> None:
    folder.mkdir(parents=True)
    for name, text in files.items():
        (folder / name).write_text(text)


def test_infiniband_counts_its_active_ports(tmp_path: Path) -> None:
    for card in range(3):
        state = "4: ACTIVE\n" if card < 2 else "1: DOWN\n"
        ports = tmp_path / "infiniband" / f"mlx5_{card}" / "ports" / "1"
        write(ports, state=state, rate="400 Gb/sec (4X NDR)\n")
    write(tmp_path / "net" / "eth0", speed="1000\n", operstate="up\n", device="")
    assert network_peak(tmp_path) == (2 * 50e9, "2 InfiniBand ports")


def test_ethernet_counts_where_there_is_hardware(tmp_path: Path) -> None:
    write(tmp_path / "net" / "lo", speed="", operstate="unknown\n")
    write(tmp_path / "net" / "docker0", speed="10000\n", operstate="up\n")
    write(tmp_path / "net" / "eth0", speed="25000\n", operstate="up\n", device="")
    write(tmp_path / "net" / "eth1", speed="-1\n", operstate="up\n", device="")
    write(tmp_path / "net" / "eth2", speed="25000\n", operstate="down\n", device="")
    assert network_peak(tmp_path) == (25e9 / 8, "Ethernet")


@pytest.mark.parametrize("text", ["", "fast\n", "400\n", "400 furlongs\n"])
def test_what_says_nothing_is_unknown(tmp_path: Path, text: str) -> None:
    write(tmp_path / "infiniband" / "x" / "ports" / "1", state="4: ACTIVE\n", rate=text)
    assert network_peak(tmp_path) == (None, "")
    assert network_peak(tmp_path / "absent") == (None, "")


class Library:
    """As much of NVML as links need: a device with *links* NVLinks, on PCIe 5 x16."""

    class NVMLError(Exception):
        pass

    NVML_NVLINK_MAX_LINKS = 18
    NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON = 90

    def __init__(self, links: int) -> None:
        self.links = links

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
        return "handle"

    def nvmlDeviceGetUUID(self, handle: str) -> str:
        return "GPU-1"

    nvmlEventTypeXidCriticalError = 8

    def nvmlDeviceRegisterEvents(self, *args: Any) -> None:
        raise self.NVMLError

    def nvmlEventSetCreate(self) -> None:
        raise self.NVMLError

    def nvmlDeviceGetNvLinkState(self, handle: str, link: int) -> int:
        if link >= self.links:
            raise self.NVMLError
        return 1

    def nvmlDeviceGetFieldValues(self, handle: str, fields: list[int]) -> list[Any]:
        value = type("Value", (), {"ullVal": 26562, "uiVal": 26562})
        return [type("Field", (), {"nvmlReturn": 0, "value": value})]

    def nvmlDeviceGetMaxPcieLinkGeneration(self, handle: str) -> int:
        return 5

    def nvmlDeviceGetMaxPcieLinkWidth(self, handle: str) -> int:
        return 16


def test_nvlinks_add_up_and_pcie_is_what_is_left() -> None:
    links = Nvml(Library(18)).links("1")
    assert links == (pytest.approx(18 * 26.562e9), "18 NVLinks")
    peak, kind = Nvml(Library(0)).links("GPU-1")
    assert peak == pytest.approx(63e9, rel=0.01)
    assert kind == "PCIe 5 x16"
    assert Nvml(Library(18)).links("unknown") == (None, "")


def test_the_host_is_reached_over_pcie_however_many_nvlinks_there_are() -> None:
    peak, kind = Nvml(Library(18)).host_link("GPU-1")
    assert (kind, peak) == ("PCIe 5 x16", pytest.approx(63e9, rel=0.01))
    assert Nvml(Library(18)).host_link("unknown") == (None, "")
    grace = Library(18)
    grace.NVML_FI_DEV_C2C_LINK_COUNT = 160  # type: ignore[attr-defined]
    assert Nvml(grace).host_link("GPU-1") == (None, "")  # its link names no rate in one direction

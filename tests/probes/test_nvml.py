"""NVML: links of a device, and a machine without a device."""

from __future__ import annotations

from typing import Any

import pytest

from zeromon.probes.nvml import Nvml


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


def test_without_nvml_there_is_no_device_and_no_complaint() -> None:
    """This holds on a machine without a driver; with one, an unknown UUID has no figures."""
    assert Nvml().read("", 0) is None
    assert Nvml().read("no-such-uuid", 0) is None


def test_a_lost_device_hides_no_other() -> None:
    class Lost(Library):
        def nvmlDeviceGetCount(self) -> int:
            return 2

        def nvmlDeviceGetHandleByIndex(self, index: int) -> str:
            if index == 0:
                raise self.NVMLError
            return "handle"

    assert Nvml(Lost(18)).uuids() == ["1"]

"""Reads AMD's devices by AMD SMI. All results are empty where the library is missing.

torch's UUID of a ROCm device is the text of AMD's unique id, byte by byte; AMD SMI calls it the serial.
Functions of AMD SMI that wait for a second sample (PCIe throughput, violations) are not called.
"""

import contextlib
import importlib
import io
from collections.abc import Callable
from functools import partial
from typing import Any

from zeromon.probes.network import pcie_peak_bandwidth
from zeromon.snapshot.host import Device

_POWERS = ("current_socket_power", "average_socket_power", "socket_power")
"""Names of the power, of which a generation of devices has one."""
_MAX_WATTS = 0xFFFF
"""A larger figure is the library's mark for none."""
_THROTTLED = "a cause that AMD SMI does not name"


class AmdSmi:
    """AMD SMI through amdsmi; *library* is a parameter for tests."""

    def __init__(self, library: Any = None) -> None:
        self._smi = library if library is not None else _load_library()
        self._handles: dict[str, Any] = {}
        for handle in self._start():
            serial = self._query_device("amdsmi_get_gpu_asic_info", handle, key="asic_serial")
            if isinstance(serial, str):
                self._handles[bare_device_serial(serial)] = handle

    def _start(self) -> list[Any]:
        if self._smi is None or self._call(lambda: (self._smi.amdsmi_init(),)) is None:
            return []
        return list(self._call(lambda: self._smi.amdsmi_get_processor_handles()) or ())

    def read(self, uuid: str, _: int, pid: int = 0) -> Device | None:
        """Returns the figures of the device with *uuid*; None for a device that is not listed."""
        handle = self._handles.get(bare_device_serial(uuid))
        if handle is None:
            return None
        get, vram = partial(self._query_device, handle=handle), self._vram_bytes
        power = self._query_device("amdsmi_get_power_info", handle)
        watts = [_known_number(power.get(name)) for name in _POWERS] if power else []
        busy = _known_number(get("amdsmi_get_gpu_activity", key="gfx_activity"))
        name = get("amdsmi_get_gpu_asic_info", key="market_name")
        return Device(
            name=str(name or ""),
            used_bytes=_known_number(vram("amdsmi_get_gpu_memory_usage", handle)),
            total_bytes=_known_number(vram("amdsmi_get_gpu_memory_total", handle)),
            own_bytes=self._own_bytes(handle, pid),
            utilization_ratio=busy / 100 if busy is not None else None,
            power_watts=next((w for w in watts if w is not None and 0 < w < _MAX_WATTS), None),
            energy_joules=self._energy_joules(handle),
            temperature_celsius=self._hottest_celsius(handle),
            ecc_errors=_known_number(get("amdsmi_get_gpu_total_ecc_count", key="uncorrectable_count")),
            throttle_reasons=self._throttle_reasons(handle),
        )

    def uuids(self) -> list[str]:
        """The serials of all devices."""
        return list(self._handles)

    def driver(self) -> str:
        """Returns the driver's version; "" without a device."""
        handle = next(iter(self._handles.values()), None)
        if handle is None:
            return ""
        return str(self._query_device("amdsmi_get_gpu_driver_info", handle, key="driver_version") or "")

    def links(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of the device's XGMI links in one direction, else of PCIe, and their kind."""
        handle = self._handles.get(bare_device_serial(uuid))
        if handle is None:
            return None, ""
        kind = getattr(getattr(self._smi, "AmdSmiLinkType", None), "AMDSMI_LINK_TYPE_XGMI", None)
        links = self._query_device("amdsmi_get_link_metrics", handle, key="links") or ()
        rates = [link["max_bandwidth"] for link in links if link["link_type"] == kind]
        rates = [rate for rate in rates if rate]
        if kind is not None and rates:
            return sum(rates) * 1e9 / 8, f"{len(rates)} XGMI links"
        return self.host_link(uuid)

    def host_link(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of PCIe between device and host in one direction."""
        handle = self._handles.get(bare_device_serial(uuid))
        pcie = self._query_device("amdsmi_get_pcie_info", handle, key="pcie_static") if handle else None
        return pcie_peak_bandwidth(
            *((pcie["pcie_interface_version"], pcie["max_pcie_width"]) if pcie else (0, 0))
        )

    # ---- single figures -----------------------------------------------------------------------

    def _vram_bytes(self, function: str, handle: Any) -> Any:
        return self._call(lambda: getattr(self._smi, function)(handle, self._smi.AmdSmiMemoryType.VRAM))

    def _own_bytes(self, handle: Any, pid: int) -> int | None:
        processes = self._query_device("amdsmi_get_gpu_process_list", handle) if pid else None
        sizes = (p["memory_usage"]["vram_mem"] for p in processes or () if p["pid"] == pid)
        return next(map(_known_number, sizes), None)

    def _energy_joules(self, handle: Any) -> float | None:
        """Joules since the driver was loaded: a counter, and its resolution in microjoules."""
        counter = self._query_device("amdsmi_get_energy_count", handle)
        if not counter:
            return None
        return float(counter["energy_accumulator"] * counter["counter_resolution"]) / 1e6

    def _hottest_celsius(self, handle: Any) -> Any:
        smi = self._smi
        return _known_number(
            self._call(
                lambda: smi.amdsmi_get_temp_metric(
                    handle, smi.AmdSmiTemperatureType.HOTSPOT, smi.AmdSmiTemperatureMetric.CURRENT
                )
            )
        )

    def _throttle_reasons(self, handle: Any) -> tuple[str, ...]:
        metrics = self._query_device("amdsmi_get_gpu_metrics_info", handle) or {}
        names = ("indep_throttle_status", "throttle_status")
        return (_THROTTLED,) if any(metrics.get(name) is True for name in names) else ()

    def _query_device(self, function: str, handle: Any, key: str = "") -> Any:
        """Returns what *function* says of the device, or a *key* of it; None where it says nothing."""
        answer = self._call(lambda: getattr(self._smi, function)(handle))
        return answer.get(key) if key and answer is not None else answer

    def _call(self, function: Callable[[], Any]) -> Any:
        try:
            return function()
        # AttributeError: an older amdsmi lacks some of the functions
        except (self._smi.AmdSmiException, AttributeError, KeyError):
            return None


def _known_number(value: Any) -> Any:
    """*value* where it is a number; None for the library's ``N/A``."""
    return value if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def _load_library() -> Any:
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # it prints where its C library is missing
            return importlib.import_module("amdsmi")
    except (ImportError, OSError, KeyError):
        return None


def bare_device_serial(uuid: str) -> str:
    """Returns AMD's unique id in lower case without ``0x``, from itself or from torch's UUID of it."""
    serial_text = uuid.lower().removeprefix("gpu-").removeprefix("0x").replace("-", "")
    with contextlib.suppress(ValueError):
        spelled = bytes.fromhex(serial_text).decode("ascii")
        if len(spelled) == 16 and int(spelled, 16) >= 0:
            return spelled.lower()
    return serial_text

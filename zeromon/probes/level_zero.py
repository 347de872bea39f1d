"""Reads Intel's devices by Level Zero's system management (sysman). Empty where the loader is missing.

The structures are those of ``zes_api.h`` and ``ze_api.h`` (version 1.8). Counters become rates between
two reads, by the device's own clock in microseconds.
"""

import ctypes
from collections.abc import Iterator
from ctypes import Structure, byref, c_char, c_double, c_int32, c_int64, c_uint32, c_uint64
from typing import Any

from zeromon.probes.network import pcie_peak_bandwidth
from zeromon.snapshot.host import Device

_TEXT = c_char * 64
_ENGINES = (0, 1)
"""ZES_ENGINE_GROUP_ALL, and ZES_ENGINE_GROUP_COMPUTE_ALL for a device without it."""
_SENSORS = (0, 1)
"""ZES_TEMP_SENSORS_GLOBAL and _GPU."""
_UNCORRECTABLE = 1
_THROTTLE = (
    (0b11, "power cap"), (0b100, "current"), (0b1000, "thermal"), (0b10000, "power brake"),
)  # fmt: skip
"""Bits of zes_freq_throttle_reason_flags_t, and the reason."""


_HEAD: tuple[tuple[str, Any], ...] = (("stype", c_uint32), ("next", ctypes.c_void_p))
"""The first fields of each structure with properties."""


class _DeviceProperties(Structure):
    _fields_ = (*_HEAD,
        ("core_stype", c_uint32), ("core_next", ctypes.c_void_p), ("type", c_uint32),
        ("vendor", c_uint32), ("device", c_uint32), ("flags", c_uint32), ("subdevice", c_uint32),
        ("clock", c_uint32), ("most_allocated", c_uint64), ("limits", c_uint32 * 7),
        ("timer", c_uint64), ("bits", c_uint32 * 2), ("uuid", ctypes.c_uint8 * 16),
        ("name", c_char * 256), ("subdevices", c_uint32), ("serial", _TEXT), ("board", _TEXT),
        ("brand", _TEXT), ("model", _TEXT), ("vendor_name", _TEXT), ("driver", _TEXT),
    )  # fmt: skip


class _Part(Structure):
    """zes_engine_properties_t, zes_ras_properties_t, and what zes_temp_properties_t begins with."""

    # Without rest, the driver writes the tail of zes_temp_properties_t behind this structure
    _fields_ = (*_HEAD,
        ("type", c_uint32), ("on_subdevice", c_uint32), ("subdevice", c_uint32), ("rest", c_uint64 * 4),
    )  # fmt: skip


class _Memory(Structure):
    _fields_ = (*_HEAD, ("health", c_uint32), ("free", c_uint64), ("size", c_uint64))


class _Counter(Structure):
    """zes_engine_stats_t and zes_power_energy_counter_t."""

    _fields_ = (("value", c_uint64), ("timestamp", c_uint64))


class _Frequency(Structure):
    _fields_ = (*_HEAD, ("megahertz", c_double * 5), ("reasons", c_uint32))


class _PciSpeed(Structure):
    _fields_ = (("generation", c_int32), ("width", c_int32), ("bytes_per_second", c_int64))


class _PciStats(Structure):
    _fields_ = (
        ("timestamp", c_uint64), ("replays", c_uint64), ("packets", c_uint64), ("received", c_uint64),
        ("sent", c_uint64), ("speed", _PciSpeed),
    )  # fmt: skip


class _PciProperties(Structure):
    _fields_ = (*_HEAD, ("address", c_uint32 * 4), ("speed", _PciSpeed), ("has", c_uint32 * 3))


class _Errors(Structure):
    _fields_ = (*_HEAD, ("categories", c_uint64 * 7))


class _Process(Structure):
    _fields_ = (*_HEAD,
        ("pid", c_uint32), ("memory", c_uint64), ("shared", c_uint64), ("engines", c_uint32),
    )  # fmt: skip


_STYPES: dict[type, int] = {
    _DeviceProperties: 0x1, _PciProperties: 0x2, _Process: 0x16, _Frequency: 0x1B, _Memory: 0x1E,
    _Errors: 0x22,
}  # fmt: skip
_ENGINE, _RAS, _TEMPERATURE = 0x5, 0xF, 0x14


class LevelZero:
    """Level Zero by its loader; *library* is a parameter for tests."""

    def __init__(self, library: str = "libze_loader.so.1") -> None:
        self._library: Any = None
        self._handles: dict[str, Any] = {}
        self._properties: dict[str, _DeviceProperties] = {}
        self._before: dict[tuple[str, str], tuple[int, int]] = {}
        try:
            self._library = ctypes.CDLL(library)
        except OSError:
            return
        if self._call("zesInit", 0):
            for driver in self._list_handles("zesDriverGet"):
                for handle in self._list_handles("zesDeviceGet", driver):
                    self._add_device(handle)

    def _add_device(self, handle: Any) -> None:
        properties = self._ask("zesDeviceGetProperties", handle, _DeviceProperties)
        if properties is not None:
            uuid = bytes(properties.uuid).hex()
            self._handles[uuid], self._properties[uuid] = handle, properties

    def read(self, uuid: str, _: int, pid: int = 0) -> Device | None:
        """Returns the figures of the device with *uuid*; None for a device that is not listed."""
        key = _bare_uuid(uuid)
        handle = self._handles.get(key)
        if handle is None:
            return None
        modules = [*self._states("zesDeviceEnumMemoryModules", handle, "zesMemoryGetState", _Memory)]
        size = sum(module.size for module in modules)
        energy = self._energy_counter(handle)
        pci = self._ask("zesDevicePciGetStats", handle, _PciStats)
        rate = self._growth_rate(key, "energy", energy, "value")
        return Device(
            name=self._properties[key].name.decode(errors="replace"),
            used_bytes=size - sum(module.free for module in modules) if size else None,
            total_bytes=size or None,
            own_bytes=self._own_bytes(handle, pid),
            utilization_ratio=self._busy_ratio(key, handle),
            power_watts=rate / 1e6 if rate is not None else None,
            energy_joules=energy.value / 1e6 if energy is not None else None,
            temperature_celsius=self._hottest_celsius(handle),
            pcie_receive_bytes_per_second=self._growth_rate(key, "received", pci, "received"),
            pcie_transmit_bytes_per_second=self._growth_rate(key, "sent", pci, "sent"),
            throttle_reasons=self._throttle_reasons(handle),
            ecc_errors=self._ecc_errors(handle),
        )

    def uuids(self) -> list[str]:
        """The UUIDs of all devices."""
        return list(self._handles)

    def driver(self) -> str:
        """Returns the driver's version; "" without a device."""
        properties = next(iter(self._properties.values()), None)
        return properties.driver.decode(errors="replace") if properties is not None else ""

    def links(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of PCIe: Xe Links tell no rate that sysman documents for one direction."""
        return self.host_link(uuid)

    def host_link(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of PCIe between device and host in one direction."""
        handle = self._handles.get(_bare_uuid(uuid))
        pci = self._ask("zesDevicePciGetProperties", handle, _PciProperties) if handle else None
        return pcie_peak_bandwidth(*((pci.speed.generation, pci.speed.width) if pci else (0, 0)))

    # ---- single figures -----------------------------------------------------------------------

    def _busy_ratio(self, key: str, handle: Any) -> float | None:
        groups = self._parts("zesDeviceEnumEngineGroups", handle, "zesEngineGetProperties", _ENGINE)
        engines = {properties.type: engine for engine, properties in groups}
        engine = next((engines[kind] for kind in _ENGINES if kind in engines), None)
        stats = self._ask("zesEngineGetActivity", engine, _Counter) if engine is not None else None
        rate = self._growth_rate(key, "busy", stats, "value")
        return min(1.0, rate / 1e6) if rate is not None else None

    def _energy_counter(self, handle: Any) -> Any:
        domain = ctypes.c_void_p()
        if not self._call("zesDeviceGetCardPowerDomain", handle, byref(domain)):
            return None
        return self._ask("zesPowerGetEnergyCounter", domain, _Counter)

    def _growth_rate(self, key: str, name: str, stats: Any, field: str) -> float | None:
        """Returns by how much a counter has grown a second since the last read."""
        if stats is None:
            return None
        sample = int(stats.timestamp), int(getattr(stats, field))
        previous = self._before.get((key, name))
        self._before[key, name] = sample
        # A counter begins anew with its driver: the rate would be negative
        if previous is None or sample[0] <= previous[0] or sample[1] < previous[1]:
            return None
        return (sample[1] - previous[1]) / ((sample[0] - previous[0]) / 1e6)

    def _hottest_celsius(self, handle: Any) -> float | None:
        candidates = self._parts(
            "zesDeviceEnumTemperatureSensors", handle, "zesTemperatureGetProperties", _TEMPERATURE
        )
        sensors = {properties.type: sensor for sensor, properties in candidates}
        sensor = next((sensors[kind] for kind in _SENSORS if kind in sensors), None)
        celsius = c_double()
        if sensor is None or not self._call("zesTemperatureGetState", sensor, byref(celsius)):
            return None
        return celsius.value

    def _throttle_reasons(self, handle: Any) -> tuple[str, ...]:
        domains = self._states(
            "zesDeviceEnumFrequencyDomains", handle, "zesFrequencyGetState", _Frequency
        )
        mask = 0
        for domain in domains:
            mask |= domain.reasons
        return tuple(reason for bits, reason in _THROTTLE if mask & bits)

    def _ecc_errors(self, handle: Any) -> int | None:
        total: int | None = None
        for errors, properties in self._parts(
            "zesDeviceEnumRasErrorSets", handle, "zesRasGetProperties", _RAS
        ):
            state = _new_structure(_Errors)
            if properties.type == _UNCORRECTABLE and self._call(
                "zesRasGetState", errors, 0, byref(state)
            ):
                total = (total or 0) + sum(state.categories)
        return total

    def _own_bytes(self, handle: Any, pid: int) -> int | None:
        count = c_uint32()
        if not pid or not self._call("zesDeviceProcessesGetState", handle, byref(count), None):
            return None
        processes = (_Process * count.value)(*(_new_structure(_Process) for _ in range(count.value)))
        if not self._call("zesDeviceProcessesGetState", handle, byref(count), processes):
            return None
        return next((int(process.memory) for process in processes if process.pid == pid), None)

    # ---- calls --------------------------------------------------------------------------------

    def _call(self, name: str, *arguments: Any) -> bool:
        """Returns whether the call succeeded; False for a function that this loader lacks."""
        function = getattr(self._library, name, None)
        return function is not None and function(*arguments) == 0

    def _ask(self, name: str, handle: Any, kind: type[Structure]) -> Any:
        structure = _new_structure(kind)
        return structure if self._call(name, handle, byref(structure)) else None

    def _list_handles(self, name: str, *parent: Any) -> list[Any]:
        count = c_uint32()
        if not self._call(name, *parent, byref(count), None) or not count.value:
            return []
        handles = (ctypes.c_void_p * count.value)()
        if not self._call(name, *parent, byref(count), handles):
            return []
        # An item of the array is an int, which ctypes passes as 32 bits: the handle would be cut
        return [ctypes.c_void_p(handle) for handle in handles[: count.value]]

    def _states(self, enum: str, handle: Any, reader: str, kind: type[Structure]) -> Iterator[Any]:
        states = (self._ask(reader, component, kind) for component in self._list_handles(enum, handle))
        return (state for state in states if state is not None)

    def _parts(self, enum: str, handle: Any, reader: str, stype: int) -> Iterator[tuple[Any, Any]]:
        """Yields the parts of the whole device, each with its properties."""
        for component in self._list_handles(enum, handle):
            properties = _Part(stype=stype)
            if self._call(reader, component, byref(properties)) and not properties.on_subdevice:
                yield component, properties


def _new_structure(kind: type[Structure]) -> Any:
    return kind(stype=_STYPES[kind]) if kind in _STYPES else kind()


def _bare_uuid(uuid: str) -> str:
    return uuid.lower().replace("-", "")

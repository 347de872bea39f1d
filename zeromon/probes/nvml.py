"""Reads NVIDIA's devices by NVML. All results are empty where the library is missing."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

from zeromon.probes.network import pcie_peak_bandwidth
from zeromon.snapshot.host import Device

_THROTTLE = (
    ("SwPowerCap", "power cap"),
    ("HwSlowdown", "hardware slowdown"),
    ("SwThermalSlowdown", "thermal"),
    ("HwThermalSlowdown", "hardware thermal"),
    ("HwPowerBrakeSlowdown", "power brake"),
)
_KIB = 1024
_MIB = 1 << 20
_GPM_SCALES = {
    "SM_UTIL": 0.01, "ANY_TENSOR_UTIL": 0.01, "DRAM_BW_UTIL": 0.01,
    "PCIE_RX_PER_SEC": _MIB, "PCIE_TX_PER_SEC": _MIB,
}  # fmt: skip
"""GPM's metrics (Hopper and newer) -> the factor that makes a ratio of %, or bytes/s of MiB/s."""
_NO_GPM_FIGURES = (None,) * len(_GPM_SCALES)


class Nvml:
    """NVML through nvidia-ml-py; *library* is a parameter for tests."""

    def __init__(self, library: Any = None) -> None:
        self._nvml = library
        self._handles: dict[str, Any] = {}
        self._links: dict[str, tuple[int, int, int]] = {}
        self._xids: dict[str, int] = {}
        self._samples: dict[str, Any] = {}
        """GPM's last sample of each device that has them."""
        self._events: Any = None
        if library is None:
            try:
                import pynvml

                self._nvml = pynvml
            except ImportError:
                return
        try:
            self._nvml.nvmlInit()
            self._find_devices()
        except self._nvml.NVMLError:
            self._nvml = None
            self._handles.clear()

    def _find_devices(self) -> None:
        for index in range(self._nvml.nvmlDeviceGetCount()):
            handle = self._call(partial(self._nvml.nvmlDeviceGetHandleByIndex, index))
            uuid = self._call(partial(self._nvml.nvmlDeviceGetUUID, handle))
            if uuid is not None:  # else the device is lost, and the others are not
                self._handles[bare_device_uuid(uuid)] = handle
        self._events = self._call(self._nvml.nvmlEventSetCreate)
        for handle in self._handles.values():
            kind = self._nvml.nvmlEventTypeXidCriticalError
            self._call(partial(self._nvml.nvmlDeviceRegisterEvents, handle, kind, self._events))

    def _collect_xids(self) -> None:
        """Reads the Xid errors since the last call, without waiting for one."""
        while self._events is not None:
            # With a timeout of 0, NVML raises NVMLError where no event waits
            event = self._call(lambda: self._nvml.nvmlEventSetWait_v2(self._events, 0))
            if event is None:
                return
            uuid = self._call(partial(self._nvml.nvmlDeviceGetUUID, event.device))
            self._xids[bare_device_uuid(uuid or "")] = int(event.eventData)

    def _nvlink_byte_rates(
        self, uuid: str, handle: Any, now_ns: int
    ) -> tuple[float | None, float | None]:
        """NVLink bytes/s received and transmitted since the last call, over all links."""
        nvml = self._nvml
        fields = [
            getattr(nvml, f"NVML_FI_DEV_NVLINK_THROUGHPUT_DATA_{side}", None) for side in ("RX", "TX")
        ]
        if None in fields:
            return None, None
        values = self._call(lambda: nvml.nvmlDeviceGetFieldValues(handle, fields))
        if not values or any(value.nvmlReturn != 0 for value in values):
            return None, None
        received, sent = (int(value.value.ullVal) * _KIB for value in values)
        previous = self._links.get(uuid)
        self._links[uuid] = (now_ns, received, sent)
        if previous is None or now_ns <= previous[0]:
            return None, None
        seconds = (now_ns - previous[0]) / 1e9
        return (received - previous[1]) / seconds, (sent - previous[2]) / seconds

    def _gpm_figures(self, uuid: str, handle: Any) -> tuple[float | None, ...]:
        """The figures of :data:`_GPM_SCALES` since the last call."""
        nvml, call = self._nvml, self._call
        support = call(lambda: nvml.nvmlGpmQueryDeviceSupport(handle))
        if not support or not support.isSupportedDevice:
            return (None, None, None, *self._sampled_pcie_rates(handle))
        sample = call(nvml.nvmlGpmSampleAlloc)
        if sample is None:
            return _NO_GPM_FIGURES
        if call(lambda: nvml.nvmlGpmSampleGet(handle, sample)) is None:
            call(lambda: nvml.nvmlGpmSampleFree(sample))
            return _NO_GPM_FIGURES
        previous = self._samples.get(uuid)
        self._samples[uuid] = sample
        if previous is None:
            return _NO_GPM_FIGURES
        request = nvml.c_nvmlGpmMetricsGet_t(
            version=nvml.NVML_GPM_METRICS_GET_VERSION,
            numMetrics=len(_GPM_SCALES),
            sample1=previous,
            sample2=sample,
        )
        for index, name in enumerate(_GPM_SCALES):
            request.metrics[index].metricId = getattr(nvml, f"NVML_GPM_METRIC_{name}")
        response = call(lambda: nvml.nvmlGpmMetricsGet(request))
        # Without it, each tick leaks a sample of the library
        call(lambda: nvml.nvmlGpmSampleFree(previous))
        if response is None:
            return _NO_GPM_FIGURES
        return tuple(
            metric.value * scale if metric.nvmlReturn == 0 else None
            for metric, scale in zip(response.metrics, _GPM_SCALES.values(), strict=False)
        )

    def _sampled_pcie_rates(self, handle: Any) -> tuple[float | None, float | None]:
        """PCIe's bytes/s in and out of a device without GPM: the library sleeps 20 ms for each."""
        nvml = self._nvml
        rates = [
            self._call(partial(nvml.nvmlDeviceGetPcieThroughput, handle, counter))
            for counter in (nvml.NVML_PCIE_UTIL_RX_BYTES, nvml.NVML_PCIE_UTIL_TX_BYTES)
        ]
        receive, transmit = (None if rate is None else rate * _KIB for rate in rates)
        return receive, transmit

    def _held(self, handle: Any, pid: int) -> tuple[int | None, int | None]:
        """Returns the bytes that process *pid* holds, and how many processes are listed.

        A container may list none, or those of others by numbers of the host.
        """
        listed = self._call(lambda: self._nvml.nvmlDeviceGetComputeRunningProcesses(handle))
        if listed is None:
            return None, None
        used_bytes = (process.usedGpuMemory for process in listed if pid and process.pid == pid)
        return next((int(n) for n in used_bytes if n is not None), None), len(listed)

    def read(self, uuid: str, now_ns: int, pid: int = 0) -> Device | None:
        """Returns the figures of the device with *uuid*; None for a device that NVML does not list."""
        self._collect_xids()
        handle = self._handles.get(bare_device_uuid(uuid))
        if handle is None:
            return None
        nvml, call = self._nvml, self._call
        memory = call(lambda: nvml.nvmlDeviceGetMemoryInfo(handle))
        use = call(lambda: nvml.nvmlDeviceGetUtilizationRates(handle))
        power = call(lambda: nvml.nvmlDeviceGetPowerUsage(handle))
        name = call(lambda: nvml.nvmlDeviceGetName(handle)) or ""
        link_receive, link_transmit = self._nvlink_byte_rates(uuid, handle, now_ns)
        sm, tensor, dram, pcie_receive, pcie_transmit = self._gpm_figures(uuid, handle)
        energy = call(lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle))
        own_bytes, processes = self._held(handle, pid)
        return Device(
            name=name.decode() if isinstance(name, bytes) else str(name),
            used_bytes=int(memory.used) if memory else None,
            total_bytes=int(memory.total) if memory else None,
            own_bytes=own_bytes,
            processes=processes,
            utilization_ratio=use.gpu / 100 if use else None,
            sm_active_ratio=sm,
            tensor_active_ratio=tensor,
            dram_active_ratio=dram,
            power_watts=power / 1000 if power is not None else None,
            energy_joules=energy / 1000 if energy is not None else None,
            temperature_celsius=call(
                lambda: nvml.nvmlDeviceGetTemperature(handle, nvml.NVML_TEMPERATURE_GPU)
            ),
            pcie_receive_bytes_per_second=pcie_receive,
            pcie_transmit_bytes_per_second=pcie_transmit,
            nvlink_receive_bytes_per_second=link_receive,
            nvlink_transmit_bytes_per_second=link_transmit,
            xid=self._xids.get(bare_device_uuid(uuid)),
            throttle_reasons=self._throttle_reasons(handle),
            ecc_errors=call(
                lambda: nvml.nvmlDeviceGetTotalEccErrors(
                    handle, nvml.NVML_MEMORY_ERROR_TYPE_UNCORRECTED, nvml.NVML_VOLATILE_ECC
                )
            ),
        )

    def uuids(self) -> list[str]:
        """The UUIDs of all devices."""
        return list(self._handles)

    def driver(self) -> str:
        """Returns the driver's version; "" without NVML."""
        if not self._nvml:
            return ""
        version = self._call(lambda: self._nvml.nvmlSystemGetDriverVersion()) or ""
        return version.decode() if isinstance(version, bytes) else str(version)

    def links(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of the device's links in one direction, and their kind."""
        handle = self._handles.get(bare_device_uuid(uuid))
        if handle is None:
            return None, ""
        nvml, call = self._nvml, self._call
        max_links = getattr(nvml, "NVML_NVLINK_MAX_LINKS", 18)
        active = sum(
            call(partial(nvml.nvmlDeviceGetNvLinkState, handle, link)) == 1 for link in range(max_links)
        )
        field = getattr(nvml, "NVML_FI_DEV_NVLINK_SPEED_MBPS_COMMON", None)
        values = call(lambda: nvml.nvmlDeviceGetFieldValues(handle, [field])) if active else None
        if values and values[0].nvmlReturn == 0 and values[0].value.uiVal:
            return active * values[0].value.uiVal * 1e6, f"{active} NVLinks"
        return self._pcie_link(handle)

    def host_link(self, uuid: str) -> tuple[float | None, str]:
        """Bytes/s between device and host in one direction; unknown without PCIe (Grace Hopper)."""
        handle = self._handles.get(bare_device_uuid(uuid))
        if handle is None:
            return None, ""
        field = getattr(self._nvml, "NVML_FI_DEV_C2C_LINK_COUNT", None)
        values = self._call(partial(self._nvml.nvmlDeviceGetFieldValues, handle, [field]))
        if field is not None and values and values[0].nvmlReturn == 0 and values[0].value.uiVal:
            return None, ""
        return self._pcie_link(handle)

    def _pcie_link(self, handle: Any) -> tuple[float | None, str]:
        generation = self._call(lambda: self._nvml.nvmlDeviceGetMaxPcieLinkGeneration(handle))
        width = self._call(lambda: self._nvml.nvmlDeviceGetMaxPcieLinkWidth(handle))
        return pcie_peak_bandwidth(generation, width)

    def _throttle_reasons(self, handle: Any) -> tuple[str, ...]:
        mask = self._call(lambda: self._nvml.nvmlDeviceGetCurrentClocksThrottleReasons(handle)) or 0
        return tuple(
            reason
            for name, reason in _THROTTLE
            if mask & getattr(self._nvml, f"nvmlClocksThrottleReason{name}", 0)
        )

    def _call(self, function: Callable[[], Any]) -> Any:
        """Returns the result of *function*; None where the device or driver does not support it."""
        try:
            return function()
        except (self._nvml.NVMLError, AttributeError):
            return None


def bare_device_uuid(uuid: str | bytes) -> str:
    """Returns *uuid* in lower case without NVML's prefix ``GPU-`` or ``MIG-``, as torch has it."""
    decoded = uuid.decode() if isinstance(uuid, bytes) else uuid
    return re.sub(r"^(GPU|MIG)-", "", decoded).lower()

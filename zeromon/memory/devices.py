"""The speeds of devices and links, and what training reaches of them. Pure data, with its sources.

Peaks are those of the vendors' data sheets: dense FLOP/s, and bytes/s in one direction. fp32 is without
TF32, which torch leaves off by default. What is reached is a share, with the least and the most of it:

- compute: 44 to 52 % of an A100's peak (Narayanan et al. 2021, arXiv 2104.04473, table 1), 38 to 43 %
  of an H100's (Llama Team 2024, arXiv 2407.21783, table 4), with communication; small models less.
- links: busbw of large messages is 75 to 95 % of the peak (nccl-tests, doc/PERFORMANCE.md).
- host: CPU-Adam updates 10^10 parameters in 2.57 s (Ren et al. 2021, arXiv 2101.06840, table 4).
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass

from zeromon.base.errors import PlanError


@dataclass(frozen=True, slots=True)
class Device:
    """The peaks of one kind of device."""

    nbytes: int
    half_flops: float
    """FLOP/s in bf16 and fp16; of v100 and t4 in fp16 alone."""
    single_flops: float
    memory: float
    """Bytes/s of its memory."""
    link: float
    """Bytes/s to the other devices of a host: NVLink, Infinity Fabric or PCIe."""
    host: float
    """Bytes/s to its host: PCIe."""

    def flops(self, compute_bytes: int) -> float:
        """Returns the FLOP/s for elements of so many bytes."""
        return self.half_flops if compute_bytes < 4 else self.single_flops


_GIB, _TERA, _GIGA = 1 << 30, 1e12, 1e9


def _device_peaks(gib: int, half_tflops: float, single_tflops: float, *gigabytes: float) -> Device:
    memory, link, host = (rate * _GIGA for rate in gigabytes)
    return Device(gib * _GIB, half_tflops * _TERA, single_tflops * _TERA, memory, link, host)


_A100 = _device_peaks(80, 312, 19.5, 2039, 300, 32)
DEVICES: Mapping[str, Device] = {
    "a100-40": _device_peaks(40, 312, 19.5, 1555, 300, 32),
    "a100": _A100, "a100-80": _A100,
    "h100": _device_peaks(80, 989, 67, 3350, 450, 64),
    "h200": _device_peaks(141, 989, 67, 4800, 450, 64),
    "b200": _device_peaks(180, 2250, 75, 8000, 900, 64),
    "l4": _device_peaks(24, 121, 30.3, 300, 32, 32),
    "l40s": _device_peaks(48, 362, 91.6, 864, 32, 32),
    "a10": _device_peaks(24, 125, 31.2, 600, 32, 32),
    "v100": _device_peaks(32, 125, 15.7, 900, 150, 16),
    "v100-16": _device_peaks(16, 125, 15.7, 900, 150, 16),
    "t4": _device_peaks(16, 65, 8.1, 320, 16, 16),
    "rtx4090": _device_peaks(24, 165, 82.6, 1008, 32, 32),
    "rtx3090": _device_peaks(24, 71, 35.6, 936, 32, 32),
    "mi300x": _device_peaks(192, 1307, 163, 5300, 448, 64),
}  # fmt: skip
"""Name -> peaks; of the SXM version where there are several."""


@dataclass(frozen=True, slots=True)
class Reached:
    """The part of a peak that is reached: likely, at least, at most."""

    likely: float
    least: float
    most: float


COMPUTE = Reached(0.45, 0.3, 0.6)
"""Share of the peak FLOP/s."""
LINK = Reached(0.8, 0.6, 0.95)
"""Share of the peak of a link, NVLink, network or PCIe."""
MEMORY = Reached(0.8, 0.6, 0.95)
"""Share of the bandwidth of a device's memory."""
HOST = Reached(109e9, 60e9, 200e9)
"""Bytes/s that the optimizer reads and writes on one host, all ranks together."""
LATENCY = Reached(20e-6, 50e-6, 10e-6)
"""Seconds of a collective besides its bytes: a NCCL kernel, and Python between two of them."""

LINKS: Mapping[str, float] = {
    "pcie3": 16e9, "pcie4": 32e9, "pcie5": 64e9, "nvlink2": 150e9, "nvlink3": 300e9,
    "nvlink4": 450e9, "nvlink5": 900e9, "ib-edr": 12.5e9, "ib-hdr": 25e9, "ib-ndr": 50e9,
}  # fmt: skip
"""Name of a link -> peak, bytes/s in one direction."""

_SPEED = re.compile(r"(?:(\d+)x)?(\d+(?:\.\d+)?)(gb|mb|g)(?:/s|ps)?")


def parse_link_peak(speed: str) -> float:
    """Returns the bytes/s of ``ib-ndr``, ``8x400Gb``, ``25GB/s``: Gb are bits and GB bytes.

    Raises :class:`PlanError` for anything else.
    """
    trimmed = speed.strip()
    count, _, name = trimmed.lower().rpartition("x")
    if name in LINKS and (count.isdigit() or not count):
        return LINKS[name] * int(count or 1)
    match = _SPEED.fullmatch(trimmed.lower())
    if match is None or not float(match[2]):
        names = ", ".join(LINKS)
        raise PlanError(
            f"{speed!r} is not the speed of a link",
            hint=f"Like 25GB/s, 8x400Gb (bits), or one of {names}.",
        )
    scale = {"g": 1e9, "m": 1e6}[match[3][0]] / (1 if "B" in trimmed else 8)
    return int(match[1] or 1) * float(match[2]) * scale


def find_named_device(label: str) -> Device | None:
    """Returns the device that *label* names: a key of :data:`DEVICES`, or what NVML calls it."""
    lowered = label.strip().lower()
    if lowered in DEVICES:
        return DEVICES[lowered]
    compact = re.sub(r"[^a-z0-9]", "", lowered.replace("nvidia", ""))
    if "a100" in compact and "40gb" in compact:
        return DEVICES["a100-40"]
    matches = [name for name in DEVICES if name in compact]
    return DEVICES[max(matches, key=len)] if matches else None


_HALVES = ("bfloat16", "float16")
_BEFORE_AMPERE = (DEVICES["v100"], DEVICES["v100-16"], DEVICES["t4"])


def peak_flops(device: str, dtype: str) -> float | str:
    """Returns the dense peak of *device* for matrices of *dtype*, FLOP/s, or why it is unknown."""
    peaks = find_named_device(device) if device else None
    if peaks is None:
        return f"peak FLOP/s of {device or 'the device'} unknown"
    if dtype in ("bfloat16", "tf32") and peaks in _BEFORE_AMPERE:
        return f"{device} has no {dtype.replace('bfloat', 'bf')}"
    if dtype == "tf32":  # by the data sheets of all of these
        return peaks.half_flops / 2
    if dtype not in (*_HALVES, "float32"):
        return f"peak FLOP/s of {device} unknown for {dtype or 'the unknown dtype of the model'}"
    return peaks.half_flops if dtype in _HALVES else peaks.single_flops

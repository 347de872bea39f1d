"""Max bytes/s of a PCIe link. Pure."""

_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of one lane by generation, after encoding (PCI-SIG)."""


def pcie_peak_bandwidth(generation: object, width: object) -> tuple[float | None, str]:
    """Bytes/s in one direction, and the link in words; (None, "") for an unknown one."""
    lane = _LANE.get(generation) if isinstance(generation, int) else None
    if lane is None or not isinstance(width, int) or not 0 < width <= 32:
        return None, ""
    return lane * width, f"PCIe {generation} x{width}"

"""Peak bandwidth of PCIe links and network adapters, and the users that listen on ports."""

from contextlib import suppress
from pathlib import Path

_LANE = {1: 0.25e9, 2: 0.5e9, 3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Bytes/s of one lane by generation, after encoding (PCI-SIG)."""


def pcie_peak_bandwidth(generation: object, width: object) -> tuple[float | None, str]:
    """Bytes/s in one direction, and the link in words; (None, "") for an unknown one."""
    lane = _LANE.get(generation) if isinstance(generation, int) else None
    if lane is None or not isinstance(width, int) or not 0 < width <= 32:
        return None, ""
    return lane * width, f"PCIe {generation} x{width}"


# ---- network adapters, from sysfs, and the users that listen on ports ----------------------------


def network_peak_bandwidth(sysfs: Path = Path("/sys/class")) -> tuple[float | None, str]:
    """Returns the bytes/s of all active adapters in one direction, and their kind; (None, "") else.

    Counts InfiniBand and RoCE ports where there are any, else Ethernet devices with hardware: a bridge
    and a loopback have no speed of their own.
    """
    ports = [rate for folder in sysfs.glob("infiniband/*/ports/*") if (rate := _port_rate(folder))]
    if ports:
        return sum(ports), f"{len(ports)} InfiniBand ports" if len(ports) > 1 else "InfiniBand"
    cards = [rate for folder in sysfs.glob("net/*") if (rate := _card_rate(folder))]
    if cards:
        return sum(cards), f"{len(cards)} Ethernet devices" if len(cards) > 1 else "Ethernet"
    return None, ""


def _port_rate(folder: Path) -> float:
    """A port's rate, as in ``400 Gb/sec (4X NDR)``; 0 where the port is down or reports no rate."""
    with suppress(OSError, ValueError, IndexError):
        if "ACTIVE" in (folder / "state").read_text():
            number, unit = (folder / "rate").read_text().split()[:2]
            return float(number) * 1e9 / 8 if unit.startswith("Gb") else 0.0
    return 0.0


def _card_rate(folder: Path) -> float:
    """A network device's speed, bytes/s; sysfs has Mbit/s. 0 where the device is down."""
    with suppress(OSError, ValueError):
        if (folder / "device").exists() and (folder / "operstate").read_text().strip() == "up":
            # The kernel says -1 where it does not know the speed of a link
            return max(0.0, float((folder / "speed").read_text()) * 1e6 / 8)
    return 0.0


_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"
_LOCAL, _STATE, _UID = 1, 3, 7
"""Places of the columns."""


def listening_user_ids(port: int, tables: tuple[str, ...] = _TABLES) -> set[int] | None:
    """Returns the uids that listen on *port*, at any address; None where the kernel does not tell."""
    uids: set[int] = set()
    is_known = False
    for table in tables:
        try:
            rows = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        is_known = True
        for row in rows:
            columns = row.split()
            listens = len(columns) > _UID and columns[_STATE] == _LISTENS
            if listens and int(columns[_LOCAL].rpartition(":")[2], 16) == port:
                uids.add(int(columns[_UID]))
    return uids if is_known else None

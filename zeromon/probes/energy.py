"""The energy that a run's node uses: its devices by their counters, processors and memory by RAPL.

RAPL: Linux's powercap, ``/sys/class/powercap``. A zone counts microjoules up to its range and begins
anew; only root may read it on most systems. The zone of a package contains its cores; that of its DRAM,
where there is one, is beside it.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from zeromon.snapshot.host import Energy

POWERCAP = Path("/sys/class/powercap")
_ZONES = ("package", "dram")


class Rapl:
    """The counters of this host's processors and memory."""

    def __init__(self, root: Path = POWERCAP) -> None:
        self._zones = list(_find_zones(root))
        self.note = "" if self._zones else "no RAPL counters (virtual machine, or unsupported CPU)"

    def read(self) -> dict[str, tuple[float, float]]:
        """Returns zone -> joules, and the range after which it begins anew; {} with :attr:`note`."""
        try:
            return {
                str(zone): (_read_joules(zone / "energy_uj"), _read_joules(zone / "max_energy_range_uj"))
                for zone in self._zones
            }
        except PermissionError:
            self.note = "RAPL counters are readable by root only"
        except (OSError, ValueError):
            self.note = "RAPL counters cannot be read"
        return {}


class EnergyMeter:
    """Adds up what counters say from one call of :meth:`add` to the next. Pure."""

    def __init__(self) -> None:
        self._last: dict[str, float] = {}
        self._device, self._host = 0.0, 0.0
        self._began_ns = 0
        self._knows_device = self._knows_host = False

    def add(
        self,
        now_ns: int,
        devices: Mapping[str, float],
        host: Mapping[str, tuple[float, float]],
        note: str = "",
    ) -> Energy:
        """Adds a reading and returns the sums since the first one.

        *devices*: UUID -> joules, each device once. *host*: see :meth:`Rapl.read`;
        *note*: why that is empty.
        """
        self._began_ns = self._began_ns or now_ns
        self._knows_device |= bool(devices)
        self._knows_host |= bool(host)
        for uuid, joules in devices.items():
            self._device += self._joules_since(uuid, joules, 0.0)
        for zone, (joules, wraps_at) in host.items():
            self._host += self._joules_since(zone, joules, wraps_at)
        return Energy(
            seconds=(now_ns - self._began_ns) / 1e9,
            device_joules=self._device if self._knows_device else None,
            host_joules=self._host if self._knows_host else None,
            host_note="" if self._knows_host else note,
        )

    def _joules_since(self, name: str, joules: float, wraps_at: float) -> float:
        previous = self._last.get(name, joules)
        self._last[name] = joules
        if joules >= previous:
            return joules - previous
        return joules + wraps_at - previous if wraps_at else joules  # else it began at 0 again


def _find_zones(root: Path) -> Iterator[Path]:
    for zone in sorted(root.glob("*-rapl*:*")):
        try:
            name = (zone / "name").read_text().strip()
        except OSError:
            continue
        if name.startswith(_ZONES):
            yield zone


def _read_joules(file: Path) -> float:
    return int(file.read_text()) / 1e6

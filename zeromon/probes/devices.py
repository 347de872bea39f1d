"""The devices of this node, of whatever vendor: one module a vendor behind one interface.

The collector reads them, because no vendor's library needs the training process, and each further
library in the training process is a risk. All results are empty where a library is missing.
"""

from zeromon.probes.amd_smi import AmdSmi
from zeromon.probes.nvml import Nvml
from zeromon.snapshot.host import Device

DeviceProbe = Nvml | AmdSmi


class Devices:
    """The devices of all vendors; *probes* is a parameter for tests."""

    def __init__(self, *probes: DeviceProbe) -> None:
        self._probes = probes or (Nvml(), AmdSmi())

    def read(self, uuid: str, now_ns: int, pid: int = 0) -> Device | None:
        """Returns the figures of a device, and of its memory what the process *pid* holds."""
        readings = (probe.read(uuid, now_ns, pid) for probe in self._probes if uuid)
        return next((device for device in readings if device is not None), None)

    def uuids(self) -> list[str]:
        """The UUIDs of all devices."""
        return [uuid for probe in self._probes for uuid in probe.uuids()]

    def driver(self) -> str:
        """Returns the versions of the drivers; "" where there is none."""
        return ", ".join(version for probe in self._probes if (version := probe.driver()))

    def links(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s of the device's links to others in one direction, and their kind."""
        return next((peak for p in self._probes if (peak := p.links(uuid))[1]), (None, ""))

    def host_link(self, uuid: str) -> tuple[float | None, str]:
        """Peak bytes/s between device and host in one direction, and the kind of the link."""
        return next((peak for p in self._probes if (peak := p.host_link(uuid))[1]), (None, ""))

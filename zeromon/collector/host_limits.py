"""Keeps the memory risks of a run's ranks and the peak bandwidths of their links between snapshots."""

from collections.abc import Sequence

from zeromon.memory.forecast import host_risk, rank_risks
from zeromon.probes.devices import Devices
from zeromon.probes.network import network_peak
from zeromon.snapshot import Links, RankSnapshot, Risk

_FORECAST_NS_A_RANK = 50_000_000


class Risks:
    """The memory risks of a run's ranks; with more ranks, each is forecast less often."""

    def __init__(self) -> None:
        self._by_rank: dict[int, tuple[int, tuple[Risk, ...]]] = {}
        """Rank -> time of the forecast (ns), and the risks."""
        self._host: tuple[Risk, ...] = ()
        self._host_ns = -(1 << 62)

    def update(self, ranks: Sequence[RankSnapshot], now_ns: int) -> dict[int, tuple[Risk, ...]]:
        """Returns rank -> its risks; of a dead rank, and of the host since a death, the last ones.

        The host's risk is a risk of every rank.
        """
        interval_ns = _FORECAST_NS_A_RANK * len(ranks)
        if now_ns - self._host_ns >= interval_ns and all(rank.alive for rank in ranks):
            risk = host_risk(ranks)
            self._host_ns, self._host = now_ns, () if risk is None else (risk,)
        for rank in ranks:
            made_ns, known = self._by_rank.get(rank.rank, (-interval_ns, ()))
            if now_ns - made_ns >= interval_ns and (rank.alive or not known):
                self._by_rank[rank.rank] = (now_ns, rank_risks(rank))
        return {rank.rank: (*self._by_rank[rank.rank][1], *self._host) for rank in ranks}


class LinkPeaks:
    """The peak bandwidths of each rank's links, read once."""

    def __init__(self) -> None:
        self._network = network_peak()
        self._by_rank: dict[int, Links] = {}

    def of(self, rank: int, uuid: str, devices: Devices) -> Links | None:
        """Returns the peaks of *rank*, whose device has that *uuid* ("" without a device)."""
        if not uuid and self._network[0] is None:
            return None
        if rank not in self._by_rank or (uuid and not self._by_rank[rank].device_kind):
            device, host, network = devices.links(uuid), devices.host_link(uuid), self._network
            self._by_rank[rank] = Links(
                device_bytes_per_second=device[0],
                device_kind=device[1],
                network_bytes_per_second=network[0],
                network_kind=network[1],
                host_bytes_per_second=host[0],
                host_kind=host[1],
            )
        return self._by_rank[rank]

"""Which ranks the views look at, and what their own collectors tell of them."""

import re
import threading
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace

from zeromon.errors import ZeromonError
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.sources.live import LiveSource
from zeromon.sources.prometheus.decode import on_our_clock

MOST_WANTED = 64
_WANTED_SECONDS = 30.0
_DETAIL_SECONDS = 1.0
_OLD_DETAIL_SECONDS = 20.0
_ADDRESS = re.compile(r"(\[[0-9A-Fa-f:.]+\]|[\w.-]+):\d{1,5}(/[\w./-]*)?")


class Wanted:
    """The ranks and the node that views asked for, each for half a minute. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ranks: dict[int, float] = {}
        self._node = ("", 0.0)

    def add(self, ranks: Sequence[int], node: str) -> bool:
        """Adds ranks, and the node whose collector has that address; whether any of them is new."""
        until = time.monotonic() + _WANTED_SECONDS
        with self._lock:
            is_new = any(rank not in self._ranks for rank in ranks)
            self._ranks.update(dict.fromkeys(list(ranks)[:MOST_WANTED], until))
            if node:
                is_new = is_new or node != self._node[0]
                self._node = (node, until)
            return is_new

    def ranks(self) -> set[int]:
        """Returns the ranks that are wanted still."""
        now = time.monotonic()
        with self._lock:
            self._ranks = {rank: until for rank, until in self._ranks.items() if until > now}
            return set(self._ranks)

    def node(self) -> str:
        """Returns the address of the wanted node's collector; "" for none."""
        with self._lock:
            node, until = self._node
            return node if until > time.monotonic() else ""


class Details:
    """The snapshots of the collectors whose ranks are wanted."""

    def __init__(self, run: str) -> None:
        self._run = run
        self._by_address: dict[str, _Detail] = {}

    def merge(
        self, run: RunSnapshot, wanted: set[int], collectors: Mapping[int, str]
    ) -> RunSnapshot:
        """Returns *run* with the *wanted* ranks, and findings about them, as their collectors tell.

        *collectors*: rank -> address of its collector. A collector that does not answer changes
        nothing.
        """
        addresses = {
            collectors[rank] for rank in wanted if _ADDRESS.fullmatch(collectors.get(rank, ""))
        }
        for unwanted in self._by_address.keys() - addresses:
            del self._by_address[unwanted]
        ranks: dict[int, RankSnapshot] = {}
        findings: dict[tuple[str, int], Finding] = {}
        for address in sorted(addresses):
            detail = self._by_address.setdefault(address, _Detail(address, self._run))
            answer = detail.snapshot()
            if answer is not None:
                came, snapshot = answer
                shift = round(came * 1e9) - snapshot.taken_ns
                ranks |= {
                    r.rank: on_our_clock(r, shift) for r in snapshot.ranks if r.rank in wanted
                }
                findings |= {
                    (f.rule, f.rank): f for f in snapshot.findings if f.rank in (-1, *wanted)
                }
        if not ranks:
            return run
        return replace(
            run,
            ranks=tuple(ranks.get(rank.rank, rank) for rank in run.ranks),
            findings=tuple(findings.get((f.rule, f.rank), f) for f in run.findings),
        )

    def troubles(self) -> list[str]:
        """Returns why collectors do not answer, one text each."""
        return [detail.trouble for detail in self._by_address.values() if detail.trouble]


class _Detail:
    """One collector's snapshots, read in a thread because the collector may not answer."""

    def __init__(self, address: str, run: str) -> None:
        self._source = LiveSource(address, run, signs=True)
        self._thread: threading.Thread | None = None
        self._newest: tuple[float, float, RunSnapshot] | None = None
        self.trouble = ""

    def snapshot(self) -> tuple[float, RunSnapshot] | None:
        """Returns when the newest snapshot came, and the snapshot; None when it is too old."""
        if self._thread is None or not self._thread.is_alive():
            self._thread = threading.Thread(target=self._read, daemon=True)
            self._thread.start()
        self._thread.join(_DETAIL_SECONDS)
        newest = self._newest
        if newest is None or time.monotonic() - newest[0] > _OLD_DETAIL_SECONDS:
            return None
        return newest[1], newest[2]

    def _read(self) -> None:
        try:
            snapshot = self._source.latest()
            self._newest, self.trouble = (time.monotonic(), time.time(), snapshot), ""
        except ZeromonError as error:
            self.trouble = str(error)

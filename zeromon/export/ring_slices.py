"""Reads the last events of each rank of a run, from its live ring or from the stored copy."""

import gzip
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from zeromon.errors import RingError
from zeromon.ring import paths
from zeromon.ring.buffer import NameKind, RingReader, ring_size
from zeromon.ring.events import Event, decode

_MOST_BYTES = 16 * ring_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEvents:
    """The events of a ring, and its names by the ids in the events."""

    rank: int
    wall_minus_mono_ns: int
    events: Sequence[Event]
    groups: Mapping[int, str]
    units: Mapping[int, str]
    texts: Mapping[int, str]


def of_run(run: str, kept: Path) -> Iterator[RingEvents]:
    """Yields the events of each ring; skips unreadable rings. *kept*: the folder of the run's record."""
    live = [path for root in paths.ring_roots() for path in (root / run).glob("rank*.ring")]
    for path in sorted([*live, *kept.glob("rank*.ring.gz")]):
        with suppress(RingError, OSError, ValueError, EOFError):
            yield _unpacked(path) if path.suffix == ".gz" else read(path)


def _unpacked(path: Path) -> RingEvents:
    with tempfile.TemporaryDirectory() as folder:
        plain = Path(folder) / "ring"
        _unpack(path, plain)
        return read(plain)


def _unpack(path: Path, plain: Path) -> None:
    """Decompresses a ring; raises :class:`ValueError` beyond the size of any ring."""
    with gzip.open(path) as packed, plain.open("wb") as file:
        while chunk := packed.read(1 << 20):
            if file.tell() > _MOST_BYTES:
                raise ValueError(f"{path} is no ring")
            file.write(chunk)


def read(path: Path) -> RingEvents:
    """Returns the events of the ring at *path*."""
    reader = RingReader(path)
    try:
        found: dict[int, dict[int, str]] = {
            NameKind.GROUP: {},
            NameKind.UNIT: {},
            NameKind.TEXT: {},
        }
        keys = {NameKind.GROUP: "label", NameKind.UNIT: "fqn", NameKind.TEXT: "text"}
        for name in reader.names():
            if name.kind in keys:
                found[name.kind][name.id] = str(name.payload.get(keys[name.kind], ""))
        raws = reader.read(final=True)
        return RingEvents(
            rank=reader.header.rank,
            wall_minus_mono_ns=reader.header.wall_ns - reader.header.mono_ns,
            events=[event for raw in raws if (event := decode(raw)) is not None],
            groups=found[NameKind.GROUP],
            units=found[NameKind.UNIT],
            texts=found[NameKind.TEXT],
        )
    finally:
        reader.close()

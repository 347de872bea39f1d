"""Reads the last events of each rank of a run, from its live ring or from the stored copy."""

import gzip
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from zeromon.base.errors import RingError
from zeromon.ring import paths
from zeromon.ring.buffer import NameKind, RingReader, ring_file_size
from zeromon.ring.codes import Kind
from zeromon.ring.events import Event, Raw, StepMark, decode_record, kind_of_record

_MAX_RING_BYTES = 16 * ring_file_size()


@dataclass(frozen=True, slots=True, kw_only=True)
class RingEvents:
    """The events of a ring, and its names by the ids in the events."""

    rank: int
    wall_minus_mono_ns: int
    events: Sequence[Event]
    groups: Mapping[int, str]
    units: Mapping[int, str]
    texts: Mapping[int, str]
    members: Mapping[int, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    """Name and ranks of each group, equal at all its ranks. Two groups may have one label."""

    @property
    def wall_ns(self) -> int:
        """When the last event was, nanoseconds since the epoch; 0 without any."""
        return self.events[-1].t_ns + self.wall_minus_mono_ns if self.events else 0


def run_events(run: str, record_folder: Path, steps: int = 0) -> Iterator[RingEvents]:
    """Yields the events of each ring; skips unreadable rings. *record_folder*: that of the run's record.

    *steps*: how many steps of each ring, the last ones; 0 is all.
    """
    live = [path for root in paths.user_ring_roots() for path in (root / run).glob("rank*.ring")]
    for path in sorted([*live, *record_folder.glob("rank*.ring.gz")]):
        with suppress(RingError, OSError, ValueError, EOFError):
            yield _read_packed(path, steps) if path.suffix == ".gz" else read_ring(path, steps)


def _read_packed(path: Path, steps: int) -> RingEvents:
    with tempfile.TemporaryDirectory() as folder:
        ring_path = Path(folder) / "ring"
        with gzip.open(path) as packed, ring_path.open("wb") as file:
            while chunk := packed.read(1 << 20):
                if file.tell() > _MAX_RING_BYTES:
                    raise ValueError(f"{path} is no ring")
                file.write(chunk)
        return read_ring(ring_path, steps)


def read_ring(path: Path, steps: int = 0) -> RingEvents:
    """Returns the events of the ring at *path*, of its last *steps* steps; 0 is all."""
    reader = RingReader(path)
    try:
        names_by_kind: dict[int, dict[int, str]] = {
            NameKind.GROUP: {},
            NameKind.UNIT: {},
            NameKind.TEXT: {},
        }
        keys = {NameKind.GROUP: "label", NameKind.UNIT: "fqn", NameKind.TEXT: "text"}
        members: dict[int, tuple[str, tuple[int, ...]]] = {}
        for name in reader.names():
            if name.kind == NameKind.GROUP:
                ranks = name.payload.get("ranks")
                member_ranks = tuple(ranks) if isinstance(ranks, list) else ()
                members[name.id] = str(name.payload.get("name", "")), member_ranks
            if name.kind in keys:
                names_by_kind[name.kind][name.id] = str(name.payload.get(keys[name.kind], ""))
        # The rank may live: this reader does not come back for a record that is being written
        raws = _last_steps(reader.read(final=True), steps)
        return RingEvents(
            rank=reader.header.rank,
            wall_minus_mono_ns=reader.header.wall_ns - reader.header.mono_ns,
            events=[event for raw in raws if (event := decode_record(raw)) is not None],
            groups=names_by_kind[NameKind.GROUP],
            units=names_by_kind[NameKind.UNIT],
            texts=names_by_kind[NameKind.TEXT],
            members=members,
        )
    finally:
        reader.close()


def _last_steps(raws: Sequence[Raw], steps: int) -> Sequence[Raw]:
    """The records from the mark before the last *steps* steps on; a step may have several marks."""
    if not steps:
        return raws
    step_numbers: set[int] = set()
    for at in range(len(raws) - 1, -1, -1):
        if kind_of_record(raws[at]) == Kind.STEP and isinstance(
            mark := decode_record(raws[at]), StepMark
        ):
            step_numbers.add(mark.step)
            if len(step_numbers) > steps:
                return raws[at:]
    return raws

"""Reads what torch's Flight Recorder has dumped: the last collectives of one rank, as pickle or JSON.

``TORCH_NCCL_DUMP_ON_TIMEOUT`` writes a file a rank (``TORCH_FR_DUMP_TEMP_FILE``, by default
``nccl_trace_rank_N``). For gloo ``torch._C._distributed_c10d`` has ``_dump_fr_trace()``, and the same
with ``_json``.
"""

import math
import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from zeromon.base.errors import TraceError
from zeromon.base.units import with_usual_numbers
from zeromon.ring.codes import ITEM_BYTES
from zeromon.ring.files import open_regular_file
from zeromon.traces.plain_pickle import load_pickle

RANK_IN_NAME = re.compile(r"(\d{1,7})(?:\.[a-z]+)?$")
DUMP_HINT = (
    "A dump of torch's Flight Recorder has entries; its name ends with the rank: nccl_trace_rank_0."
)
_MAX_BYTES = 256 << 20
_MAX_TEXT_LENGTH = 200
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Entry:
    """A collective, or a send or receive, as one rank has issued it."""

    group: str
    sequence: int
    """Below 0 for a send or receive."""
    op: str
    """As torch calls it, without the backend; with the peer of a send or receive."""
    sizes: tuple[tuple[tuple[int, ...], ...], ...]
    """Sizes of the inputs, and of the outputs."""
    types: tuple[tuple[str, ...], ...]
    state: str
    ended: bool
    created_ns: int
    """Wall clock."""
    stack: tuple[str, ...]

    @property
    def elements(self) -> tuple[int, int]:
        """Elements of all inputs, and of all outputs."""
        inputs, outputs = (sum(map(math.prod, side)) for side in self.sizes)
        return inputs, outputs

    @property
    def nbytes(self) -> int:
        """Bytes of the larger side."""
        item = max((ITEM_BYTES.get(name, 1) for side in self.types for name in side), default=1)
        return max(self.elements) * item


@dataclass(frozen=True, slots=True, kw_only=True)
class Dump:
    """The file of one rank."""

    rank: int
    file: str
    written_ns: int
    """When the file was written, by its time stamp."""
    groups: dict[str, tuple[str, tuple[int, ...]]]
    """Name of a group -> (its description, its ranks; empty where the backend does not say)."""
    entries: tuple[Entry, ...]


def read_flight_dump(path: Path) -> Dump:
    """Reads one file; raises :class:`TraceError` where it is no dump."""
    try:
        status = path.stat()
        with open_regular_file(path) as file:
            first_byte = file.read(1)
            file.seek(0)
            # Pickles begin with this byte from protocol 2 on, and no JSON does
            if first_byte == b"\x80":
                content = load_pickle(file.read, path.name)
            else:
                content = msgspec.json.decode(with_usual_numbers(file.read(_MAX_BYTES)))
        rank = content.get("rank")
        if not isinstance(rank, int):
            rank = int(RANK_IN_NAME.findall(path.name)[0])
        entries = tuple(_read_entry(row) for row in content["entries"])
        groups = {
            _short_text(name): (
                _short_text(config.get("desc")),
                tuple(map(int, re.findall(r"\d{1,7}", config["ranks"]))),
            )
            for name, config in (content.get("pg_config") or {}).items()
        }
        for row in content["entries"]:
            name, description = row["process_group"]
            groups.setdefault(_short_text(name), (_short_text(description), ()))
    except OSError as error:
        raise TraceError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, TypeError, LookupError, AttributeError, OverflowError, RecursionError):
        raise TraceError(f"{path} is no dump of torch's Flight Recorder", DUMP_HINT) from None
    return Dump(rank=rank, file=path.name, written_ns=status.st_mtime_ns, groups=groups, entries=entries)


def _read_entry(row: dict[str, Any]) -> Entry:
    is_p2p = bool(row.get("is_p2p"))
    sides = ("input", "output")
    return Entry(
        group=_shared_object(_short_text(row["process_group"][0])),
        sequence=-_read_count(row["p2p_seq_id"]) if is_p2p else _read_count(row["collective_seq_id"]),
        op=_shared_object(_short_text(row["profiling_name"]).rpartition(":")[2]),
        sizes=_shared_object(
            tuple(
                tuple(tuple(map(_read_count, size)) for size in row.get(f"{side}_sizes") or ())
                for side in sides
            )
        ),
        types=_shared_object(
            tuple(tuple(map(_short_text, row.get(f"{side}_dtypes") or ())) for side in sides)
        ),
        state=_shared_object(_short_text(row.get("state"))),
        # torch retires a call whose end its watchdog has seen, also where the state is older
        ended=bool(row.get("retired")) or row.get("state") == "completed",
        created_ns=_read_count(row["time_created_ns"]),
        stack=_shared_object(
            tuple(
                f"{_short_text(frame['filename'])}:{_short_text(frame['line'])}:{_short_text(frame['name'])}"
                for frame in row.get("frames") or ()
            )
        ),
    )


@lru_cache(maxsize=1 << 16)
def _shared_object(value: T) -> T:
    """The first object that equals *value*: thousands of ranks make the same calls."""
    return value


def _read_count(value: Any) -> int:
    """A number that counts something, or a time."""
    if not isinstance(value, int) or not 0 <= value < 1 << 63:
        raise ValueError
    return value


def _short_text(value: Any) -> str:
    return str(value)[:_MAX_TEXT_LENGTH]

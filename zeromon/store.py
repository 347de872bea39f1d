"""The run store: what is kept of a run on disk, ``<store>/runs/<run>/``.

``snapshot.json`` is the last picture, replaced atomically; ``rank*.ring.gz`` are the rings as they
were at the end; ``history/`` has every step (:mod:`zeromon.history`), ``traces/`` those on demand.
Reading never unpickles and never trusts: a broken file is an error with a name.
"""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import suppress
from pathlib import Path

import msgspec

from zeromon import paths
from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.snapshot import RunSnapshot

_KEEP = 50

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RunSnapshot)


def encode(run: RunSnapshot) -> bytes:
    """A snapshot as JSON."""
    return _ENCODER.encode(run)


def decode(text: bytes) -> RunSnapshot:
    """A snapshot from JSON; raises :class:`ZeromonError` for anything else."""
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        hint = "It was cut short, or written by another version of zeromon."
        raise ZeromonError(f"not a run snapshot: {error}", hint) from error


class Store:
    """The folder of all kept runs."""

    def __init__(self, root: Path | None = None) -> None:
        self.runs = (root or paths.store_root()) / "runs"

    def history(self, run: str) -> Path:
        """The folder of its history; see :mod:`zeromon.history`."""
        return self.runs / run / "history"

    def save(self, run: RunSnapshot) -> None:
        """Replaces the kept picture of *run*."""
        folder = paths.make_private(self.runs / run.run)
        temporary = folder / f".snapshot.{os.getpid()}"
        temporary.write_bytes(encode(run))
        temporary.chmod(0o600)
        temporary.replace(folder / "snapshot.json")

    def free_name(self, run: str, started_wall: float) -> str:
        """*run*, or *run*-2, ...: a name that no other run's record has, so that none is lost."""
        for attempt in range(1, 10_000):
            name = run if attempt == 1 else f"{run}-{attempt}"
            if not (self.runs / name / "snapshot.json").exists():
                return name
            with suppress(ZeromonError):
                if abs(self.load(name).started_wall - started_wall) < 0.001:
                    return name
        return run

    def keep_ring(self, run: str, ring: Path) -> None:
        """Keeps a copy of a dead rank's ring."""
        folder = paths.make_private(self.runs / run)
        temporary = folder / f".{ring.name}.{os.getpid()}"
        with ring.open("rb") as source, gzip.open(temporary, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        temporary.chmod(0o600)
        temporary.replace(folder / f"{ring.name}.gz")

    def names(self) -> list[str]:
        """The kept runs, the newest first."""
        found = [(p.stat().st_mtime_ns, p.parent.name) for p in self.runs.glob("*/snapshot.json")]
        return [name for _, name in sorted(found, reverse=True)]

    def load(self, name: str | None = None) -> RunSnapshot:
        """The run *name*, or one that begins so, or the newest."""
        names = self.names()
        if not names:
            raise RunNotFound("no run has been recorded yet")
        if name is None:
            chosen = names[0]
        elif name in names:
            chosen = name
        else:
            chosen = self._only_match(name, names)
        return decode((self.runs / chosen / "snapshot.json").read_bytes())

    def _only_match(self, name: str, names: list[str]) -> str:
        matches = [known for known in names if known.startswith(name)]
        if len(matches) > 1:
            raise RunAmbiguous(f"several runs begin with {name}: {', '.join(matches[:5])}")
        if not matches:
            hint = f"The newest are: {', '.join(names[:5])}"
            raise RunNotFound(f"no run is called {name}", hint)
        return matches[0]

    def prune(self, keep: int = _KEEP) -> None:
        """Forgets all but the newest runs."""
        for name in self.names()[keep:]:
            with suppress(OSError):
                shutil.rmtree(self.runs / name)

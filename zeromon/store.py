"""The run store: what is kept of a run on disk, ``<store>/runs/<run>/``.

``snapshot.json`` is the last picture, ``manifest.json`` its headline; both are replaced atomically.
``rank*.ring.gz`` are the rings as they were at the end, ``traces/`` those on demand; what it was like
before is the record (:mod:`zeromon.record`).
Reading never unpickles and never trusts: a broken file is an error with a name.
"""

from __future__ import annotations

import gzip
import os
import shutil
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import msgspec

from zeromon import paths
from zeromon.errors import RunAmbiguous, RunNotFound, ZeromonError
from zeromon.report import verdict
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """What a list of runs says of one."""

    run: str
    node: str
    command: tuple[str, ...]
    started_wall: float
    """Seconds since the epoch, as is the next."""
    taken_wall: float
    ended: bool
    verdict: str
    strategy: str
    device: str
    ranks: int
    steps: int
    step_seconds: float | None
    exposed_ratio: float | None
    """The most exposed rank's."""
    memory_bytes: int
    """Reserved on the fullest device, resident on the host without one; -1 where unknown."""
    worst: str
    """The severity of its gravest finding, "" without any."""
    format: int = 1


def manifest_of(run: RunSnapshot) -> Manifest:
    """The headline of a picture."""
    first = run.ranks[0] if run.ranks else None
    exposed = [rank.exposed_ratio for rank in run.ranks if rank.exposed_ratio is not None]
    seconds = [rank.step_seconds for rank in run.ranks if rank.step_seconds is not None]
    reserved = [rank.memory.reserved_bytes for rank in run.ranks if rank.memory is not None]
    severities = {finding.severity for finding in run.findings}
    return Manifest(
        run=run.run,
        node=run.node,
        command=run.command,
        started_wall=run.started_wall,
        taken_wall=run.taken_wall,
        ended=run.ended,
        verdict=verdict(run),
        strategy=first.strategy if first else "",
        device=first.device if first else "",
        ranks=len(run.ranks),
        steps=max((rank.steps for rank in run.ranks), default=0),
        step_seconds=max(seconds, default=None),
        exposed_ratio=max(exposed, default=None),
        memory_bytes=max(reserved or [rank.rss_bytes for rank in run.ranks], default=-1),
        worst=next((s for s in ("critical", "warning", "info") if s in severities), ""),
    )


def _replace(path: Path, content: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(content)
    temporary.chmod(0o600)
    temporary.replace(path)


_MANIFEST = msgspec.json.Decoder(Manifest)


class Store:
    """The folder of all kept runs."""

    def __init__(self, root: Path | None = None) -> None:
        self.runs = (root or paths.store_root()) / "runs"

    def folder(self, run: str) -> Path:
        """All that is kept of *run*."""
        return self.runs / run

    def history(self, run: str) -> Path:
        """The folder of its history; see :mod:`zeromon.history`."""
        return self.folder(run) / "history"

    def save(self, run: RunSnapshot) -> None:
        """Replaces the kept picture of *run*, and its headline."""
        folder = paths.make_private(self.folder(run.run))
        _replace(folder / "manifest.json", _ENCODER.encode(manifest_of(run)))
        _replace(folder / "snapshot.json", encode(run))

    def free_name(self, run: str, started_wall: float) -> str:
        """*run*, or *run*-2, ...: a name that no other run's record has, so that none is lost."""
        for attempt in range(1, 10_000):
            name = run if attempt == 1 else f"{run}-{attempt}"
            if not (self.folder(name) / "snapshot.json").exists():
                return name
            with suppress(ZeromonError):
                if abs(self.load(name).started_wall - started_wall) < 0.001:
                    return name
        return run

    def keep_ring(self, run: str, ring: Path) -> None:
        """Keeps a copy of a dead rank's ring."""
        folder = paths.make_private(self.folder(run))
        temporary = folder / f".{ring.name}.{os.getpid()}"
        with ring.open("rb") as source, gzip.open(temporary, "wb", compresslevel=1) as packed:
            shutil.copyfileobj(source, packed, 1 << 20)
        temporary.chmod(0o600)
        temporary.replace(folder / f"{ring.name}.gz")

    def names(self) -> list[str]:
        """The kept runs, the newest first."""
        found = [(p.stat().st_mtime_ns, p.parent.name) for p in self.runs.glob("*/snapshot.json")]
        return [name for _, name in sorted(found, reverse=True)]

    def manifests(self) -> list[Manifest]:
        """The headlines of all kept runs, the newest first; of one that has none, from its picture."""
        return [manifest for name in self.names() if (manifest := self._manifest(name)) is not None]

    def _manifest(self, name: str) -> Manifest | None:
        with suppress(OSError, msgspec.DecodeError, UnicodeDecodeError):
            return _MANIFEST.decode((self.folder(name) / "manifest.json").read_bytes())
        with suppress(OSError, ZeromonError):
            return manifest_of(self.load(name))
        return None

    def load(self, name: str | None = None) -> RunSnapshot:
        """The last picture of the run *name*, or of one that begins so, or of the newest."""
        return decode((self.folder(self.resolve(name)) / "snapshot.json").read_bytes())

    def resolve(self, name: str | None = None) -> str:
        """The full name of the run *name*, of one that begins so, or of the newest."""
        names = self.names()
        if not names:
            raise RunNotFound("no run has been recorded yet")
        if name is None:
            return names[0]
        return name if name in names else self._only_match(name, names)

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
                shutil.rmtree(self.folder(name))

"""The run store: the records of runs on disk, ``<store>/runs/<run>/``.

``snapshot.json`` is the last snapshot, ``manifest.json`` its headline; both are replaced atomically.
``rank*.ring.gz`` are the rings as they were at the end, ``traces/`` those on demand; what it was like
before is the record (:mod:`zeromon.storage.snapshot_log`). ``about.json`` is what the user wrote about
the run. The name of the folder is the name of the run, whatever the files in it say.
Reading never unpickles and never trusts: a broken file is an error with a name.
"""

import difflib
import errno
import gzip
import os
import shutil
import time
from collections.abc import Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median

import msgspec

from zeromon.base.errors import RingError, RunAmbiguous, RunNotFound, ZeromonError
from zeromon.base.units import with_usual_numbers
from zeromon.readout.figures import mean_step_seconds
from zeromon.readout.verdict import judge_run, state_and_cause
from zeromon.ring import paths
from zeromon.ring.files import replace_file, replacing_file
from zeromon.ring.paths import is_run_id as is_run_id
from zeromon.snapshot import RankSnapshot, RunSnapshot, Severity
from zeromon.snapshot.focus import highest_exposed_ratio
from zeromon.snapshot.rank import NOT_SEEN
from zeromon.snapshot.run import About

_KEEP = 50
_RESERVE = ".reserve"
"""The file of a live run's folder that keeps room for its last snapshot."""
_MIN_RESERVED = 1 << 18
_ABANDONED_SECONDS = 60.0
"""A collector saves every ten seconds; a record that was not for so long has none."""
_NONE = "no run has been recorded yet"
DEPTH = 2
"""How many folders are above that of a run in the store."""

_ENCODER = msgspec.json.Encoder()
_DECODER = msgspec.json.Decoder(RunSnapshot)


def encode_snapshot(run: RunSnapshot) -> bytes:
    """Returns a snapshot as JSON."""
    return _ENCODER.encode(run)


def decode_snapshot(content: bytes) -> RunSnapshot:
    """Returns the snapshot of a JSON text; raises :class:`ZeromonError` for anything else."""
    try:
        return _DECODER.decode(with_usual_numbers(content))
    except (ValueError, RecursionError) as error:
        hint = "It was cut short, or written by another version of zeromon."
        raise ZeromonError(f"not a run snapshot: {error}", hint) from error


@dataclass(frozen=True, slots=True, kw_only=True)
class Manifest:
    """The summary of a run, for a list of runs."""

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
    """The largest exposed ratio of a rank."""
    memory_bytes: int
    """Reserved on the fullest device, resident on the host without one; -1 where unknown."""
    worst: str
    """The severity of its gravest finding, "" without any."""
    job: str = ""
    """See :attr:`RunSnapshot.job`."""
    health: str = ""
    """The word of its verdict."""
    severity: str = ""
    """The severity of the verdict, "" where all is well."""
    cause: str = ""
    """The last threat to the run; "" without one."""
    pace_seconds: tuple[float, ...] = ()
    """The median step time in each of at most 16 equal parts of the last steps, the newest last."""


@dataclass(frozen=True, slots=True)
class ListedRun:
    """One row of a list of runs."""

    manifest: Manifest
    live: bool
    about: About = field(default_factory=About)

    @property
    def watched_verdict(self) -> str:
        """The verdict, and whether nobody has seen the end."""
        watched = self.live or self.manifest.ended
        return f"{'' if watched else 'no longer monitored: '}{self.manifest.verdict}"


def _replace_all_files(folder: Path, files: Mapping[str, bytes]) -> None:
    for name, content in files.items():
        replace_file(folder / name, content)


def _mark_run_unfinished(run: RunSnapshot) -> RunSnapshot:
    """Returns the last snapshot of a record without an end: what its ranks do is not known."""
    outcome = f"{NOT_SEEN} the rest of the run"
    ranks = tuple(
        rank.with_status(alive=False, ended=outcome) if rank.status.alive else rank for rank in run.ranks
    )
    return replace(run, ended=True, unfinished=True, ranks=ranks)


def open_run_folder(folder: Path, *, make: bool = False) -> AbstractContextManager[Path]:
    """Returns the folder of a run, for as long as something is written to it, as a path by a descriptor.

    No link is followed to it. Raises :class:`~zeromon.base.errors.RingError` for one of another user.
    """
    return paths.anchored_folder(folder, DEPTH, make=make)


def manifest_of_run(run: RunSnapshot) -> Manifest:
    """Returns the summary of a snapshot."""
    first_rank = run.ranks[0] if run.ranks else None
    seconds = [mean for rank in run.ranks if (mean := mean_step_seconds(rank)) is not None]
    reserved = [
        rank.memory.device.reserved_bytes for rank in run.ranks if rank.memory.device is not None
    ]
    severities = {finding.severity for finding in run.findings}
    judged = judge_run(run)
    return Manifest(
        run=run.run,
        node=run.node,
        command=run.command,
        started_wall=run.started_wall,
        taken_wall=run.taken_wall,
        ended=run.ended,
        verdict=state_and_cause(run),
        strategy=first_rank.strategy if first_rank else "",
        device=first_rank.device if first_rank else "",
        ranks=len(run.ranks),
        steps=run.last_step,
        step_seconds=max(seconds, default=None),
        exposed_ratio=highest_exposed_ratio(run.ranks),
        memory_bytes=max(reserved or [rank.memory.rss_bytes for rank in run.ranks], default=-1),
        worst=next((s for s in Severity if s in severities), ""),
        job=run.job,
        health=judged.health,
        severity=judged.severity or "",
        cause=judged.cause if judged.severity in _SEVERE or not run.ranks else "",
        pace_seconds=_pace_of_rank(first_rank) if first_rank else (),
    )


_MAX_PACE_PARTS = 16


def _pace_of_rank(rank: RankSnapshot) -> tuple[float, ...]:
    """The values of :attr:`Manifest.pace_seconds`."""
    seconds = [step.seconds for step in rank.steps.recent]
    length = -(-len(seconds) // _MAX_PACE_PARTS) or 1
    return tuple(round(median(seconds[n : n + length]), 6) for n in range(0, len(seconds), length))


_SEVERE = (Severity.WARNING, Severity.CRITICAL)
_MANIFEST = msgspec.json.Decoder(Manifest)
_ABOUT = msgspec.json.Decoder(About)


class Store:
    """The folder of all recorded runs; *runs*: another folder with records, such as a copy."""

    def __init__(self, root: Path | None = None, *, runs: Path | None = None) -> None:
        self.root = root or runs or paths.record_store_root()
        self.runs = runs or self.root / "runs"

    def folder(self, run: str) -> Path:
        """Returns the folder of *run*."""
        return self.runs / run

    def history(self, run: str) -> Path:
        """Returns the folder of its history; see :mod:`zeromon.storage.step_history`."""
        return self.folder(run) / "history"

    def save(self, run: RunSnapshot) -> None:
        """Replaces the last snapshot of *run*, and its summary.

        Room for the next one is reserved, so that the store may be full by then.
        """
        files = {
            "manifest.json": _ENCODER.encode(manifest_of_run(run)),
            "snapshot.json": encode_snapshot(run),
        }
        with open_run_folder(self.folder(run.run), make=True) as folder:
            try:
                _replace_all_files(folder, files)
            except OSError as error:
                if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                    raise
                (folder / _RESERVE).unlink(missing_ok=True)
                _replace_all_files(folder, files)
            if run.ended:
                (folder / _RESERVE).unlink(missing_ok=True)
            else:
                # As far as there is room on the disk
                nbytes = max(2 * sum(map(len, files.values())), _MIN_RESERVED)
                flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
                with suppress(OSError):
                    fd = os.open(folder / _RESERVE, flags, 0o600)
                    try:
                        if os.fstat(fd).st_size < nbytes:
                            # Not ftruncate(): a hole reserves no block of the disk
                            os.posix_fallocate(fd, 0, nbytes)
                    finally:
                        os.close(fd)

    def free_name(self, run: str, started_wall: float) -> str:
        """Returns *run*, or *run*-2, ...: a name that no other run's record has."""
        for attempt in range(1, 10_000):
            name = run if attempt == 1 else f"{run}-{attempt}"
            if paths.foreign_reason(self.folder(name)):
                continue
            if not (self.folder(name) / "snapshot.json").exists():
                return name
            with suppress(ZeromonError):
                # The same start is the same run: a collector that starts again goes on with its record
                if abs(self.load(name).started_wall - started_wall) < 0.001:
                    return name
        return run

    def keep_ring(self, run: str, name: str, ring: memoryview) -> None:
        """Writes the *ring* of a dead rank, whose file is called *name*."""
        with (
            open_run_folder(self.folder(run), make=True) as folder,
            replacing_file(folder / f"{name}.gz") as temporary,
            gzip.open(temporary, "wb", compresslevel=1) as packed,
        ):
            packed.write(ring)

    def refusal(self) -> str:
        """Why the store is not used: it is a link, or another user's; "" where it is."""
        return paths.foreign_reason(self.root, self.runs)

    def names(self) -> list[str]:
        """Returns the recorded runs, the newest first; no link and no other user's folder is one."""
        dated: list[tuple[int, str]] = []
        if self.refusal():
            return []
        with suppress(OSError):  # of a disk that is gone
            for path in self.runs.glob("*/snapshot.json"):
                with suppress(OSError):
                    # A record that is deleted before its stat() must not hide the others
                    if not paths.foreign_reason(path.parent):
                        dated.append((path.stat().st_mtime_ns, path.parent.name))
        return [name for _, name in sorted(dated, reverse=True)]

    def list_manifests(self) -> list[Manifest]:
        """Returns the summaries of all recorded runs, the newest first."""
        return [manifest for name in self.names() if (manifest := self._run_manifest(name)) is not None]

    def _run_manifest(self, name: str) -> Manifest | None:
        with suppress(OSError, ValueError, RecursionError):
            manifest = _MANIFEST.decode((self.folder(name) / "manifest.json").read_bytes())
            # An older version writes no health, and an abandoned run says that it goes on
            if manifest.health and (manifest.ended or self._is_written(name)):
                return replace(manifest, run=name)
        with suppress(OSError, ZeromonError):
            return manifest_of_run(self.load(name))
        return None

    def load(self, name: str | None = None) -> RunSnapshot:
        """Returns the last snapshot of the run that :meth:`resolve` finds."""
        run = self.resolve(name)
        final = replace(decode_snapshot((self.folder(run) / "snapshot.json").read_bytes()), run=run)
        return final if final.ended or self._is_written(run) else _mark_run_unfinished(final)

    def _is_written(self, run: str) -> bool:
        """Returns whether a collector saved *run* so recently that it may still follow it."""
        age = time.time() - (self.folder(run) / "snapshot.json").stat().st_mtime
        return age < _ABANDONED_SECONDS

    def resolve(self, name: str | None = None) -> str:
        """Returns the full name of the run *name* or beginning with it; None means the newest."""
        names = self.names()
        if not names:
            reason = self.refusal()
            raise RunNotFound(reason, paths.OWN_FOLDER) if reason else RunNotFound(_NONE)
        if name is None:
            return names[0]
        return name if name in names else self._only_match(name, names)

    def _only_match(self, name: str, names: list[str]) -> str:
        matches = [full_name for full_name in names if full_name.startswith(name)]
        if len(matches) > 1:
            raise RunAmbiguous(f"several runs begin with {name}: {', '.join(matches[:5])}")
        if not matches:
            like = difflib.get_close_matches(name, names, n=5, cutoff=0.5)
            hint = f"{'Similar runs' if like else 'Newest runs'}: {', '.join(like or names[:5])}"
            raise RunNotFound(f"no run named {name}", hint)
        return matches[0]

    def about(self, run: str) -> About:
        """Returns what the user wrote about *run*; nothing where it cannot be read."""
        with suppress(OSError, ValueError, RecursionError):
            return _ABOUT.decode((self.folder(run) / "about.json").read_bytes())
        return About()

    def write_about(self, run: str, notes: About) -> None:
        """Replaces what the user wrote about *run*."""
        with open_run_folder(self.folder(run)) as folder:
            replace_file(folder / "about.json", _ENCODER.encode(notes))

    def nbytes(self, run: str) -> int:
        """Returns the size of the record of *run*."""
        sizes = (path.lstat() for path in self.folder(run).rglob("*") if not path.is_dir())
        return sum(size.st_size for size in sizes)

    def remove(self, run: str) -> None:
        """Deletes the record of *run*; raises :class:`OSError`."""
        if reason := paths.foreign_reason(self.folder(run)):
            raise RingError(reason, paths.OWN_FOLDER)
        # By a descriptor: a link that is put in place of the store meanwhile leads nowhere
        with paths.anchored_folder(self.runs, 1, make=False) as runs:
            shutil.rmtree(runs / run)

    def rename(self, run: str, name: str) -> None:
        """Gives the record of *run* another name, that no record has; raises :class:`OSError`."""
        if reason := paths.foreign_reason(self.folder(run)):
            raise RingError(reason, paths.OWN_FOLDER)
        with paths.anchored_folder(self.runs, 1, make=False) as runs:
            (runs / run).rename(runs / name)

    def prune_runs(self, keep: int = _KEEP) -> None:
        """Deletes all but the newest runs."""
        for name in self.names()[keep:]:
            with suppress(OSError):
                self.remove(name)


@dataclass(frozen=True, slots=True)
class StepQuery:
    """A range of time or of steps, some ranks, and a number of points."""

    since_us: int = 0
    """Steps that began at or after this moment, microseconds since the epoch."""
    until_us: int | None = None
    """Steps that began before this moment; None: no end."""
    ranks: tuple[int, ...] = ()
    """Only these ranks; (): all."""
    most: int = 600
    """About how many points of each rank."""
    steps: tuple[int, int] | None = None
    """Only these steps, the first and the last one; None: all."""


WHOLE_RUN = StepQuery()
"""All steps of all ranks."""

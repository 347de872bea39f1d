"""What batches are made of: reading, transforms, collation. Pure."""

from zeromon.snapshot import LoadingRow, RankSnapshot, WorkerMemory
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

_FROM_STORAGE = 0.1
"""From this share on, what a loader reads comes from storage, and not from the page cache."""
_LEAST_READ = 1 << 20


def parts(made: LoadingRow) -> dict[str, float]:
    """Seconds by part, the longest first; they sum to the time in which batches were made."""
    rest = max(0.0, made.fetch_seconds - made.collate_seconds - (made.transform_seconds or 0.0))
    found = {"collate": made.collate_seconds}
    if made.transform_seconds is None:
        found["read and transform"] = rest
    else:
        found |= {"read": rest, "transform": made.transform_seconds}
    return dict(sorted(found.items(), key=lambda part: -part[1]))


def from_disk(made: LoadingRow) -> float | None:
    """The share of what was read that came from disks; None where next to nothing was read."""
    return made.disk_bytes / _read(made) if _read(made) >= _LEAST_READ else None


def from_nfs(made: LoadingRow) -> float:
    """The largest share of it that NFS servers can have sent: other programs read there, too."""
    return min(1.0, made.nfs_bytes / _read(made)) if _read(made) >= _LEAST_READ else 0.0


def _read(made: LoadingRow) -> int:
    return max(made.read_bytes, made.disk_bytes)


def from_storage(made: LoadingRow) -> float | None:
    """The same from a disk or a server, where it is enough to matter; None: from the page cache."""
    share = max(from_disk(made) or 0.0, from_nfs(made))
    return share if share >= _FROM_STORAGE else None


def workers_text(workers: WorkerMemory | None) -> str:
    """``4 x 307.0 MiB``: the memory of DataLoader workers; ``-`` without any."""
    return f"{workers.count} x {human_bytes(workers.nbytes / workers.count)}" if workers else "-"


def loading_text(rank: RankSnapshot) -> str:
    """``batches: 512, 21 ms each: read and transform 81 %, collate 19 %``; "" where unknown."""
    made = rank.loading
    if made is None or made.fetch_seconds <= 0:
        return ""
    shares = (f"{name} {human_ratio(s / made.fetch_seconds)}" for name, s in parts(made).items())
    text = (
        f"batches: {human_count(made.batches)}, {human_seconds(made.fetch_seconds / made.batches)}"
    )
    text += f" to make each: {', '.join(shares)}"
    disk = from_disk(made)
    if disk is None:
        return text
    text += f"; {human_ratio(disk)} of {human_bytes(_read(made))} that were sampled came from disks"
    return f"{text}, at most {human_ratio(from_nfs(made))} from NFS" if made.nfs_bytes else text

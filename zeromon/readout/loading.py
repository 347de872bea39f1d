"""What batches are made of: reading, transforms, collation. Pure."""

from __future__ import annotations

from zeromon.snapshot import LoadingRow, RankSnapshot
from zeromon.units import human_bytes, human_count, human_ratio, human_seconds

_FROM_DISK = 0.1
"""From this share on, what a loader reads comes from a disk, and not from the page cache."""
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
    most = max(made.read_bytes, made.disk_bytes)
    return made.disk_bytes / most if most >= _LEAST_READ else None


def reads_disk(made: LoadingRow) -> bool:
    """Whether a disk, and not the page cache, is what a loader reads from."""
    return (from_disk(made) or 0.0) >= _FROM_DISK


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
    read = human_bytes(max(made.read_bytes, made.disk_bytes))
    return f"{text}; {human_ratio(disk)} of {read} that were sampled came from disks"

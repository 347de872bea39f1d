"""Prints a line for each rank and poll of the recordings: a digest of all that the collector knows then.

The recordings are folded in polls, whole and with bytes that are damaged by a fixed chance. The first
line is the file of the fold. For :mod:`test_compiled`.
"""

from __future__ import annotations

import gzip
import hashlib
import random
import tempfile
from collections.abc import Iterator
from pathlib import Path

import msgspec

import zeromon.fold.state
from zeromon.collector.rank import RankFollower
from zeromon.collector.run import RunFollower
from zeromon.fold.checkpoint import checkpoint_of_state
from zeromon.fold.summarize import summarize_rank
from zeromon.ring.buffer import HEADER_SIZE, NAMES_SIZE

RINGS = Path(__file__).resolve().parents[1] / "data" / "rings"
DAMAGED, POLLS = 200, 9


def rings(recording: Path, damaged: int) -> Iterator[tuple[str, bytes]]:
    """Name and content of each ring of *recording*, with so many changed bytes among its records."""
    chance = random.Random(f"{recording.name} {damaged}")
    for path in sorted(recording.glob("*.ring.gz")):
        content = bytearray(gzip.decompress(path.read_bytes()))
        for _ in range(damaged):
            at = chance.randrange(HEADER_SIZE + NAMES_SIZE, len(content))
            content[at] = chance.randrange(256)
        yield path.name.removesuffix(".gz"), bytes(content)


def digests(recording: Path, damaged: int) -> Iterator[str]:
    """What is known of each rank after each poll."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        for ring, content in rings(recording, damaged):
            (folder / ring).write_bytes(content)
        run = RunFollower(folder)
        run.poll()
        followers = [RankFollower(path) for path in run.ranks and sorted(folder.glob("*.ring"))]
        records = [follower.reader.read(final=True) for follower in followers]
        for poll in range(POLLS):
            for follower, all_ in zip(followers, records, strict=True):
                follower._learn_names()
                part = slice(len(all_) * poll // POLLS, len(all_) * (poll + 1) // POLLS)
                zeromon.fold.fold.fold_records(follower.state, all_[part])
            run._match_arrivals(followers)
            for follower in followers:
                state, skew = follower.state, run._skew
                known = [
                    summarize_rank(state), checkpoint_of_state(state, 1), skew.wait_seconds(state.rank),
                    skew.late_seconds(state.rank), state.window.communicated_ns(),
                ]  # fmt: skip
                text = msgspec.msgpack.encode(known, enc_hook=repr)
                yield f"{recording.name} {damaged} {poll} {hashlib.sha256(text).hexdigest()}"


if __name__ == "__main__":
    print(zeromon.fold.state.__file__)
    for recording in sorted(RINGS.iterdir()):
        for damaged in (0, DAMAGED):
            print(*digests(recording, damaged), sep="\n")

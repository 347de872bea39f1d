"""A change that is tried in the live ranks: which one, and in which steps it is on.

The steps are divided into blocks of equal size: off, on, on, off, and again. Every rank knows the plan
before its first step, so no rank asks another one where it is. A rank enters a block only if it has seen
that all ranks agreed to it: each writes its word into one file, :data:`MARGIN` steps before the block.
No rank of a job that synchronizes in every step can be so far ahead, so all ranks read the same words.
"""

import struct
from typing import NamedTuple

from zeromon.ring.codes import TextEnum

REQUEST, WORDS = "try.json", "try.words"
MARGIN = 4
"""A rank agrees to a block so many steps before it."""
MIN_BLOCK_STEPS = MARGIN + 2
LEASE_SECONDS = 15.0
"""A request that was not renewed for so long is withdrawn."""
WORD = struct.Struct("<II")
"""Number of the trial, and how many blocks the rank has agreed to; at 8 times its rank."""


class Change(TextEnum):
    """A change that can be tried: a closed list. None of these can change a result."""

    SHARED_COLLECTIONS = "shared collections"
    KEEP_GATHERED = "keep gathered"
    PREFETCH = "prefetch"


class Plan(NamedTuple):
    """One trial, as all ranks read it."""

    number: int
    change: Change
    first: int
    """The first step of the first block."""
    size: int
    """Steps of a block."""
    blocks: int
    rings: tuple[str, ...]
    """The ring of each rank: another process, such as one of a restart, does not take part."""

    def start(self, block: int) -> int:
        """The first step of *block*."""
        return self.first + block * self.size

    @staticmethod
    def is_on(block: int) -> bool:
        """Returns True if the change is on in *block*: off, on, on, off."""
        return block % 4 in (1, 2)

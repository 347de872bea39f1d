"""The result of ``zeromon trace analyze --json``: one encoder and one reader."""

from collections.abc import Sequence
from pathlib import Path

import msgspec

from zeromon.traces.analysis import RankTrace

RESULT_FILE = "analysis.json"
"""The file in a capture's folder that holds the result."""


class _Result(msgspec.Struct):
    ranks: list[RankTrace]


_DECODER = msgspec.json.Decoder(_Result)


def encode_result(ranks: Sequence[RankTrace]) -> bytes:
    """Returns the analysis of *ranks* as JSON."""
    return msgspec.json.encode({"ranks": ranks})


def read_result(folder: Path) -> list[RankTrace]:
    """Reads the result in a capture's *folder*; [] when it is missing or broken."""
    try:
        return _DECODER.decode((folder / RESULT_FILE).read_bytes()).ranks
    except (OSError, ValueError, RecursionError):
        return []

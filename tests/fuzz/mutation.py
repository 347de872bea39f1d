"""Inputs made from a corpus by seeded mutation: case N of a target is the same on every machine."""

from __future__ import annotations

import json
import zlib
from collections.abc import Sequence
from copy import deepcopy
from pathlib import Path
from random import Random
from typing import Any

CORPUS = Path(__file__).parent / "corpus"
_PLANTED = Path(__file__).parents[1] / "data" / "planted"
_SUFFIXES = {
    "config_json": (".json",), "config_yaml": (".yaml",), "config_script": (".py",),
    "config_launch": (".txt", ".sh"),
}  # fmt: skip
DIVIDED = b"\n====\n"
"""Between the files of a seed that has several."""
_MOST_BYTES = 1 << 16

WORDS = (0, 1, 63, 64, 255, 256, 0x7FFF, 0xFFFF, 0x7FFFFFFF, 0x80000000, 0xFFFFFFFF,
         (1 << 53) + 1, (1 << 62) - 1, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)  # fmt: skip
TOKENS = (
    b"-1", b"0", b"1e999", b"1e-999", b"NaN", b"-Infinity", b"9" * 400, b"18446744073709551616",
    b"null", b"true", b"[]", b"{}", b'""', b"[" * 3000, b'{"a":' * 2000, b"\x00", b"\x1b[31m",
    b"\xff\xfe", b"\xed\xa0\x80", b"\\ud800", b"\r\n", b"\r\n\r\n", b"%00", b"%", b"*",
    b"&a [*a, *a]", b"!!python/object:os.system", b"{", b"}", b"(", b"lambda: ", b"\xe2\x80\xae",
)  # fmt: skip
VALUES: tuple[Any, ...] = (
    None, True, 0, -1, 1, 1 << 31, (1 << 63) - 1, 1 << 64, -(1 << 63), 1e308, -0.0, 1e-320, "", "0", "x",
    "\x1b[31m\n", "\ud800", "1e999", "a" * 3000, [], {}, [[]], [None], {"": None}, [0] * 300,
    {"a": {"a": {"a": []}}}, "../../etc/passwd",
)  # fmt: skip


def seeds_of(target: str) -> list[Path]:
    """The files of the corpus; of configurations also six small ones that tests/data has planted."""
    own = sorted(path for path in (CORPUS / target).glob("*") if path.is_file())
    planted = [
        path
        for path in sorted(_PLANTED.glob("[0-9][0-9]/*"))
        if path.suffix in _SUFFIXES.get(target, ()) and path.stat().st_size < 6000
    ]
    return [*planted[:6], *own]


class Mutations:
    """The cases of one target, which change one or several of its seeds."""

    def __init__(self, target: str) -> None:
        self.seeds = [path.read_bytes() for path in seeds_of(target)]
        self._values = [[_value(part) for part in seed.split(DIVIDED)] for seed in self.seeds]
        self._salt = zlib.crc32(target.encode()) << 32

    def case(self, number: int) -> bytes:
        """The input of case *number*; the first ones are the seeds themselves."""
        if number < len(self.seeds):
            return self.seeds[number]
        pick = Random(self._salt + number)
        chosen = pick.randrange(len(self.seeds))
        part = pick.randrange(len(self._values[chosen]))
        value = self._values[chosen][part]
        if value is None or pick.random() >= 0.7:
            return self._of_bytes(pick, self.seeds[chosen])
        parts = self.seeds[chosen].split(DIVIDED)
        return DIVIDED.join((*parts[:part], self._of_value(pick, value), *parts[part + 1 :]))

    def _of_value(self, pick: Random, value: Any) -> bytes:
        changed = json.loads(json.dumps(value))
        for _ in range(pick.choice((1, 1, 1, 2, 4))):
            changed = mutated_value(pick, changed)
        data = json.dumps(changed, ensure_ascii=pick.random() < 0.9).encode(errors="surrogatepass")
        return data if pick.random() < 0.95 else mutated_bytes(pick, data, self.seeds)

    def _of_bytes(self, pick: Random, seed: bytes) -> bytes:
        for _ in range(pick.choice((1, 1, 2, 4, 8))):
            seed = mutated_bytes(pick, seed, self.seeds)
        return seed[:_MOST_BYTES]


def _value(seed: bytes) -> Any:
    try:
        return json.loads(seed)
    except ValueError:
        return None


def mutated_value(pick: Random, value: Any) -> Any:
    """*value*, a tree as of JSON, with one place changed."""
    way: list[tuple[Any, Any]] = []
    at = value
    while isinstance(at, dict | list) and at and (not way or pick.random() < 0.85):
        key = pick.choice(list(at)) if isinstance(at, dict) else pick.randrange(len(at))
        way.append((at, key))
        at = at[key]
    if not way:
        return _any(pick)
    owner, key = way[-1]
    outer = json.dumps(way[-2:][0][0])
    kind = pick.randrange(8)
    if kind == 0:
        del owner[key]
    elif kind == 1 and isinstance(owner, list):
        owner.insert(key, owner[pick.randrange(len(owner))])
    elif kind == 2 and isinstance(owner, dict):
        owner[pick.choice(("", "\x1b]0;x\x07", "a" * 500, str(key) * 2, "0"))] = at
    elif kind == 3 and isinstance(at, int | float):
        owner[key] = pick.choice((at + 1, -at, at * 1e9, at << 40 if isinstance(at, int) else at / 3))
    elif kind == 4 and way:
        owner[key] = json.loads(outer)
    else:
        owner[key] = _any(pick)
    return value


def _any(pick: Random) -> Any:
    return deepcopy(pick.choice(VALUES))


def mutated_bytes(pick: Random, data: bytes, others: Sequence[bytes]) -> bytes:
    """*data* with one change."""
    size = len(data)
    at = pick.randrange(size + 1)
    kind = pick.randrange(10)
    if kind == 0 and size:
        at = min(at, size - 1)
        return data[:at] + bytes((data[at] ^ 1 << pick.randrange(8),)) + data[at + 1 :]
    if kind == 1:
        return data[:at] + bytes((pick.randrange(256),)) + data[at + 1 :]
    if kind == 2:
        return data[:at]
    if kind == 3:
        return data[:at] + data[at + pick.choice((1, 2, 8, 64, 500)) :]
    if kind == 4:
        length = pick.choice((1, 8, 64, 300))
        return data[:at] + data[at : at + length] * pick.choice((2, 3, 20)) + data[at + length :]
    if kind == 5:
        other = pick.choice(others)
        begin = pick.randrange(len(other) + 1)
        return data[:at] + other[begin : begin + pick.choice((8, 64, 500, 4000))] + data[at:]
    if kind in (6, 7):
        token = pick.choice(TOKENS)
        return data[:at] + token + data[at + pick.choice((0, 1, len(token))) :]
    at &= ~7
    width = pick.choice((1, 2, 4, 8))
    word = pick.choice(WORDS) if kind == 8 else pick.getrandbits(64)
    return data[:at] + (word & (1 << 8 * width) - 1).to_bytes(width, "little") + data[at + width :]

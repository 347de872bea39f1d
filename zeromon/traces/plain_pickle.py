"""Reads pickles of plain data, piece by piece: numbers, text, bytes, lists, tuples, dictionaries.

A pickle is a program for a stack machine. This machine has no instruction that names, calls or builds
anything of Python, so it runs no code of a file, whatever that says; it refuses the file instead. What
it keeps is bounded. A file of gigabytes has one long list: its items are handed over in batches and
forgotten (decision 050).
"""

import pickletools
import re
import struct
from collections.abc import Callable
from typing import Any

from zeromon.base.errors import TraceError

Read = Callable[[int], bytes]
"""Returns the next bytes of a file, no more than so many; none at its end."""
Taken = Callable[[list[Any], list[Any]], bool]
"""Gets a list and items to append to it; True where they were used and are to be forgotten."""

_CHUNK = 1 << 18
_MARGIN = 300
"""No instruction of the main loop is longer."""
# The loop stops a margin before the end of its data: unpadded, the last instructions never run.
# 0xff is no instruction, so a pickle without its end stops there as damaged.
_BEHIND = b"\xff" * 2 * _MARGIN
_MAX_ITEMS = 8_000_000
"""Max items of all lists and dictionaries together, without what was handed over."""
_MAX_BYTES = 256 << 20
"""Max bytes of all text together."""
_MAX_SHARED = 200_000
_MAX_REFERENCES = 64_000_000
_PUT, _MARK, _APPENDS, _SET_ITEMS, _DICT, _LIST, _END = b"\x94(eu}]."
_GET, _LONG_GET, _LONG, _INT, _FLOAT, _APPEND, _SET_ITEM, _TUPLE = b"hj\x8aJGast"
_REFERENCES = re.compile(rb"\x94\(((?:h.|j....)+)e(?!\()", re.DOTALL)
"""A list of nothing but references, from its place in the memo to its end."""
_REFERENCE = re.compile(rb"h(.)|j(....)", re.DOTALL)
_SMALL = {0x4B: 1, 0x4D: 2, _INT: 4}
"""Instruction of a number -> its bytes."""
_SIZES = {0x8C: 1, 0x58: 4, 0x8D: 8, 0x43: 1, 0x42: 4, 0x8E: 8}
"""Instruction of text or of bytes -> the bytes of its length."""
_BYTES = b"CB\x8e"
_PUTS = {0x71: 1, 0x72: 4}
_CONSTANTS = {0x4E: None, 0x88: True, 0x89: False, 0x29: ()}
_TUPLES = {0x85: 1, 0x86: 2, 0x87: 3}
_NAMES = {ord(opcode.code): opcode.name for opcode in pickletools.opcodes}
_SKIPPED = {0x80: 1, 0x95: 8}
"""The version, and what says how much to read at once."""


class Shared(list[Any]):
    """A list that comes again and again in a file: one object, which may not be changed."""


def load_pickle(read_bytes: Read, name: str, take_items: Taken | None = None) -> Any:
    """Returns the content of the pickle *name*; raises :class:`TraceError` for any other file."""
    try:
        return _Machine(read_bytes, take_items).run()
    except _Refused as error:
        raise TraceError(f"{name}: {error}", HINT) from None
    except (IndexError, KeyError, TypeError, ValueError, OverflowError, struct.error):
        raise TraceError(f"{name} is damaged, or no pickle", HINT) from None


HINT = "zeromon reads what torch writes: lists, dictionaries, text and numbers, and nothing else."


class _Refused(Exception):
    """The file is complete and understood, and is not read."""


class _Machine:
    def __init__(self, read_bytes: Read, take_items: Taken | None) -> None:
        self._read = read_bytes
        self._taken = take_items or (lambda _, __: False)
        self._data = b""
        self._at = 0
        self._stack: list[Any] = []
        self._marks: list[tuple[int, int]] = []
        self._memo: list[Any] = []
        self._shared: dict[bytes, Shared] = {}
        self._items = self._bytes = 0

    def run(self) -> Any:
        """Executes the file up to its end."""
        self._more()
        if self._data[:1] != b"\x80":
            raise ValueError
        while not self._step():
            self._more()
        return self._stack.pop()

    def _more(self, min_bytes: int = 0) -> None:
        """Reads on, *min_bytes* or more; behind the end of the file comes no instruction."""
        # Checked once per chunk: a check of each instruction would slow the loop down
        if max(len(self._stack), self._items) > _MAX_ITEMS or self._bytes > _MAX_BYTES:
            raise _Refused("the pickle has too much to keep beside its events")
        if len(self._memo) > _MAX_REFERENCES:
            raise _Refused(f"the pickle has more than {_MAX_REFERENCES:,} objects")
        new = self._read(_CHUNK + min_bytes)
        if len(new) < min_bytes or not (new or self._data):
            raise _Refused("the pickle is truncated")
        self._data, self._at = self._data[self._at :] + (new or _BEHIND), 0

    def _step(self) -> bool:
        """Executes instructions until more data are needed; True at the end of the pickle."""
        # Local names: the loop runs once per instruction, and attributes are slower
        data, at, stack, memo = self._data, self._at, self._stack, self._memo
        marks, limit, small = self._marks, len(data) - _MARGIN, _SMALL
        while at < limit:
            code = data[at]
            if code == _GET:
                stack.append(memo[data[at + 1]])
                at += 2
            elif code == _LONG_GET:
                stack.append(memo[int.from_bytes(data[at + 1 : at + 5], "little")])
                at += 5
            elif code == _LONG:
                next_at = at + 2 + data[at + 1]
                stack.append(int.from_bytes(data[at + 2 : next_at], "little", signed=True))
                at = next_at
            elif code == _PUT:
                memo.append(stack[-1])
                at += 1
            elif code == _MARK:
                marks.append((len(stack), len(memo)))
                at += 1
            elif code in small:
                next_at = at + 1 + small[code]
                stack.append(int.from_bytes(data[at + 1 : next_at], "little", signed=code == _INT))
                at = next_at
            elif code == _LIST:
                at = self._list(data, at + 1)
            elif code == _DICT:
                stack.append({})
                at += 1
            elif code == _SET_ITEMS:
                self._set_items(*marks.pop())
                at += 1
            elif code == _APPENDS:
                self._append_items(*marks.pop())
                at += 1
            elif code == _END:
                return True
            else:
                self._at = at + 1
                self._execute_rare(code)
                # A long text reads on, which replaces the data and the place
                data, at = self._data, self._at
                limit = len(data) - _MARGIN
        self._at = at
        return False

    def _execute_rare(self, code: int) -> None:
        """Executes the instruction *code*, which lies before the current place."""
        stack, data, at = self._stack, self._data, self._at
        if code in _PUTS:
            self._at += _PUTS[code]
            if int.from_bytes(data[at : self._at], "little") != len(self._memo):
                raise _Refused("the pickle numbers its objects in a way that torch does not")
            self._memo.append(stack[-1])
        elif code == _FLOAT:
            stack.append(struct.unpack_from(">d", data, at)[0])
            self._at += 8
        elif code in _SIZES:
            stack.append(self._text(code))
        elif code == _APPEND:
            self._append_items(len(stack) - 1, len(self._memo))
        elif code == _SET_ITEM:
            self._set_items(len(stack) - 2, 0)
        elif code in _CONSTANTS:
            stack.append(_CONSTANTS[code])
        elif code in _TUPLES or code == _TUPLE:
            start = self._marks.pop()[0] if code == _TUPLE else len(stack) - _TUPLES[code]
            stack[start:] = [tuple(stack[start:])]
        elif code in _SKIPPED:
            self._at += _SKIPPED[code]
        else:
            name = _NAMES.get(code)
            problem = f"has {name}, which no plain data need" if name else "is truncated or damaged"
            raise _Refused(f"the pickle {problem}")

    def _text(self, code: int) -> str | bytes:
        """The text or the bytes at the current place."""
        start = self._at + _SIZES[code]
        length = int.from_bytes(self._data[self._at : start], "little")
        self._at = start
        # Before the reading: a forged length of gigabytes is refused, and not allocated
        self._bytes += length
        stop = start + length
        if stop > len(self._data) - _MARGIN:
            self._more(max(0, stop - len(self._data)))
            stop = length
        content = self._data[stop - length : stop]
        self._at = stop
        return content if code in _BYTES else content.decode(errors="replace")

    def _list(self, data: bytes, at: int) -> int:
        """A new list, or the same as before where it has the same references; where it ends."""
        match = _REFERENCES.match(data, at)
        if match is None:
            self._stack.append([])
            return at
        shared = self._shared.get(match[1])
        if shared is None:
            shared = Shared(
                self._memo[int.from_bytes(short or long, "little")]
                for short, long in _REFERENCE.findall(match[1])
            )
            self._items += len(shared)
            if len(self._shared) < _MAX_SHARED:
                self._shared[match[1]] = shared
        self._stack.append(shared)
        self._memo.append(shared)
        return match.end()

    def _set_items(self, start: int, _: int) -> None:
        """Sets all keys and values from *start* on in the dictionary below them."""
        stack = self._stack
        items = stack[start:]
        del stack[start:]
        keys = items[::2]
        "".join(keys)  # raises for a key that is no text: only the hash of text is random
        owner = stack[-1]
        if type(owner) is not dict:
            raise ValueError
        owner.update(zip(keys, items[1::2], strict=True))
        self._items += len(items)

    def _append_items(self, start: int, remembered: int) -> None:
        """Appends all items from *start* on to the list below them, unless they are handed over."""
        stack, memo = self._stack, self._memo
        items = stack[start:]
        del stack[start:]
        owner = stack[-1]
        # No subclass: a Shared list stands in many places, and would grow in all of them
        if type(owner) is not list:
            raise ValueError
        if not self._taken(owner, items):
            owner += items
            self._items += len(items)
            return
        # _set_items() has counted the keys and values of these dictionaries
        self._items -= sum(2 * len(item) for item in items)
        # The memo refers to each item, and would keep what was handed over
        forgotten = set(map(id, items))
        for number in range(remembered, len(memo)):
            if id(memo[number]) in forgotten:
                memo[number] = None

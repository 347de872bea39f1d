"""Texts of others in any field of a snapshot."""

from __future__ import annotations

import dataclasses
from typing import Any, get_args, get_type_hints

EVIL = "\x1b[2Jx\x1b]0;pwn\x07\x9b31m\u202e\r"


FIELDS = dataclasses.fields


def evil(value: Any, kind: Any = None, text: str = EVIL) -> Any:
    """*value* with *text* behind each text that its type does not restrict; *kind*: the type."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        kinds = get_type_hints(type(value))
        fields = {f.name: evil(getattr(value, f.name), kinds[f.name], text) for f in FIELDS(value)}
        return dataclasses.replace(value, **fields)
    if isinstance(value, str):
        return value + text if kind in (str, Any) else value
    if isinstance(value, dict):
        return {evil(key, str, text): evil(each, Any, text) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        inner = (get_args(kind) or (Any,))[0]
        return type(value)(evil(each, inner, text) for each in value)
    return value

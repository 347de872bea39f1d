"""What a rank has set, and what of a remedy is left: nothing is advised that is already so. Pure.

Every remedy passes :func:`remaining` (:class:`zeromon.diagnosis.rule.Rule`). What a rank has set is
known from its environment, the effective DeepSpeed configuration, its DataLoader and its model. A line
of a diff that only sets something is compared with that; a line of other code stays as it is.
"""

import json
import math
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from zeromon.snapshot import ConfigFormat, RankSnapshot, Remedy

_MIB = 1 << 20
_KEYWORD = re.compile(r"\b(\w+)=(?:[A-Za-z_]+\.)?([\w.]+)")
"""A keyword argument and its value, of an enumeration the member."""


def setting(rank: RankSnapshot, name: str) -> str:
    """The effective value of the DeepSpeed setting whose name ends with *name*; "" where unknown."""
    return next((s.effective for s in rank.settings if s.name.endswith(name)), "")


def as_number(text: str) -> float | None:
    """A number as a setting shows it; None for anything else."""
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


class Remaining(NamedTuple):
    """What is left of a remedy."""

    remedy: Remedy | None
    already: tuple[str, ...]
    """What it would set and what is set already, as ``name=value``."""


def remaining(remedy: Remedy, rank: RankSnapshot) -> Remaining:
    """Returns *remedy* without what *rank* has set already; None where nothing is left."""
    lines = [(line, sets(line, remedy.dialect)) for line in remedy.diff.splitlines()]
    old = {name: value for line, at in lines if line[:1] == "-" for name, value in at}
    new = {name for line, at in lines if line[:1] == "+" for name, _ in at}
    known = {name: _known(rank, remedy.dialect, name) for name in {*old, *new}}
    done: dict[str, str] = {}
    for line, at in lines:
        if line[:1] == "+" and all(_is_so(known[n], wanted, old.get(n, "")) for n, wanted in at):
            done |= {name: known[name] or "" for name, _ in at}
    gone = {name for name in old.keys() - new if known[name] == ""}
    kept = [
        _with_effective(line, at, known)
        for line, at in lines
        if not at or any(name not in done and name not in gone for name, _ in at)
    ]
    already = tuple(f"{name}={value}" for name, value in done.items())
    left = bool(remedy.rungs) or any(line[:1] in ("+", "-") for line in kept)
    return Remaining(replace(remedy, diff="\n".join(kept)) if left else None, already)


def sets(line: str, dialect: str) -> list[tuple[str, str]]:
    """What a line of a diff sets: (name, value); [] for other code."""
    text = line[1:].partition("  #")[0].strip()
    if line[:1] not in ("+", "-"):
        return []
    if dialect == ConfigFormat.ENVIRONMENT:
        pairs = (word.partition("=") for word in text.split())
        return [(name, value) for name, _, value in pairs]
    if dialect == ConfigFormat.DEEPSPEED:
        try:
            return list(_leaves(json.loads(f"{{{text}}}")))
        except ValueError:
            return []
    return _KEYWORD.findall(text)


def _leaves(tree: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, str]]:
    for key, value in tree.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value if isinstance(value, str) else json.dumps(value)


def _known(rank: RankSnapshot, dialect: str, name: str) -> str | None:
    """The value that *rank* has set; "" where it has set none, None where that is unknown."""
    if dialect == ConfigFormat.ENVIRONMENT:
        variables = rank.process.get("variables", {})
        newer = variables.get(name.replace("PYTORCH_CUDA_ALLOC", "PYTORCH_ALLOC"))
        return newer or variables.get(name)
    if dialect == ConfigFormat.DEEPSPEED:
        values = (s.effective for s in rank.settings if f".{s.name}".endswith(f".{name}"))
        return next(values, "" if rank.settings else None)
    if dialect == ConfigFormat.DATA_LOADER:
        workers = rank.loader.get("num_workers")
        if name == "persistent_workers":
            return str(rank.loader["persistent_workers"]) if name in rank.loader else None
        return str(workers) if name == "num_workers" and workers is not None else None
    model = rank.models[0] if rank.models else {}
    if name == "bucket_cap_mb":
        cap = model.get("bucket_cap_bytes")
        return None if cap is None else f"{cap / _MIB:g}"
    value = model.get(name)
    return None if value is None else str(value)


def _is_so(known: str | None, wanted: str, old: str) -> bool:
    """Whether *known* is what is *wanted*, or lies beyond it as seen from *old*, which it replaces."""
    if not known:
        return False
    now, goal, from_ = as_number(known), as_number(wanted), as_number(old)
    if now is None or goal is None:
        return set(wanted.split(",")) <= set(known.split(","))
    return now == goal or (from_ is not None and (now - goal) * (goal - from_) > 0)


def _with_effective(line: str, at: list[tuple[str, str]], known: dict[str, str | None]) -> str:
    """*line*; where it removes one DeepSpeed setting, with the value of it that is in effect."""
    if len(at) != 1 or not line.startswith(f'- "{at[0][0]}": '):
        return line
    name, value = at[0]
    now = known[name]
    return f'- "{name}": {now}' if now and not _is_so(now, value, "") else line

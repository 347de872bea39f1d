"""Traces made to hang, crash or fill the memory: each is read in bounded time, or refused."""

from __future__ import annotations

import gzip
import json
import tracemalloc
from collections.abc import Iterable
from pathlib import Path

import pytest

from zeromon.base.errors import TraceError
from zeromon.traces import kineto as stream
from zeromon.traces.analysis import analyze_trace
from zeromon.traces.kineto import read_trace

MIB = 1 << 20


def event(ts: str, dur: str) -> str:
    head = '{"ph":"X","cat":"kernel","name":"k","pid":0,"tid":7,'
    return f'{head}"ts":{ts},"dur":{dur},"args":{{}}}}'


def listed(*events: str) -> str:
    return f'{{"traceEvents":[{",".join(events)}]}}'


SURVIVES = {
    "huge exponents": listed(*[event("1e999990", "1")] * 3, event("1", "2")),
    "overflow": listed(event("1e999999", "1"), event("1", "2")),
    "an exponent beyond all": listed(event("1e999999999999", "1"), event("1", "2")),
    "a tiny exponent": listed(event("1e-999999", "1"), event("1", "2")),
    "a long duration": listed(
        event("-5", "-9"), event('"nan"', '"inf"'), event("1", "1e400"), event("1", "2")
    ),
    "5,000 digits": listed(event("9" * 5000, "1"), event("1", "2")),
    "a rank of 5,000 digits": '{"distributedInfo":{"rank": '
    + "9" * 5000
    + "},"
    + listed(event("1", "2"))[1:],
}  # fmt: skip
REFUSED = {
    "nested brackets": '{"traceEvents":[{"ph":"X","args":' + "[" * 200_000 + "]" * 200_000 + "}]}",
    "only brackets": "[" * 3_000_000,
    "brackets in a name": '{"traceEvents":[{"ph":"X","name":"' + "}]" * 150_000,
}


@pytest.mark.parametrize("kind", SURVIVES)
def test_an_event_that_cannot_be_is_skipped(tmp_path: Path, kind: str) -> None:
    (tmp_path / "t.json").write_text(SURVIVES[kind])
    data = read_trace(tmp_path / "t.json")
    assert [(e.start_ns, e.end_ns) for e in data.device if e.end_ns - e.start_ns == 2000] == [
        (1000, 3000)
    ]
    assert data.rank is None or data.rank < 1e9
    analyze_trace(data, 0)


@pytest.mark.parametrize("kind", REFUSED)
def test_what_holds_no_event_is_refused(tmp_path: Path, kind: str) -> None:
    (tmp_path / "t.json").write_text(REFUSED[kind])
    with pytest.raises(TraceError, match="holds no trace events"):
        read_trace(tmp_path / "t.json")


def packed(path: Path, parts: Iterable[bytes]) -> Path:
    with gzip.open(path, "wb", 1) as file:
        for part in parts:
            file.write(part)
    return path


@pytest.mark.parametrize("head", [b" ", b'{"traceEvents":[{"ph":"X","name":"'])
def test_a_bomb_takes_bounded_memory_and_is_scanned_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, head: bytes
) -> None:
    """8 MiB for a limit of 1 MiB."""
    monkeypatch.setattr(stream, "_MAX_BYTES", MIB)
    monkeypatch.setattr(stream, "_CHUNK", MIB >> 4)
    bomb = packed(tmp_path / "t.json.gz", [head, *[b" " * (MIB >> 2)] * 32])
    tracemalloc.start()
    with pytest.raises(TraceError):
        read_trace(bomb)
    assert tracemalloc.get_traced_memory()[1] < 6 * MIB
    tracemalloc.stop()


def test_the_events_before_a_bomb_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_MAX_BYTES", MIB)
    monkeypatch.setattr(stream, "_CHUNK", MIB >> 4)
    good = json.dumps({"traceEvents": []})[:-2].encode() + event("1", "2").encode()
    parts = [good, b',{"ph":"X","name":"', *[b"x" * (MIB >> 2)] * 8]
    data = read_trace(packed(tmp_path / "t.json.gz", parts))
    assert len(data.device) == 1
    assert any("larger than 1 MiB" in note for note in data.notes)


@pytest.mark.parametrize("name", ["/dev/zero", "/dev/null", "/dev"])
def test_what_is_no_file_is_refused(name: str) -> None:
    with pytest.raises(TraceError):
        read_trace(Path(name))

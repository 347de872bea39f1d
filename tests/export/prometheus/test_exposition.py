"""What is written by hand says the same as what prometheus-client writes."""

from __future__ import annotations

import gzip
import math
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import changed, full_run, rank, run, summary
from by_client import ByClient
from hypothesis import HealthCheck, given, settings, strategies as st
from prometheus_client import Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics
from prometheus_client.parser import text_string_to_metric_families
from served import Fixed

from zeromon.base.units import printable
from zeromon.collector.daemon import Collector
from zeromon.export.prometheus.metrics import Exposition, Writer
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.snapshot import Finding, RankSnapshot, RunSnapshot
from zeromon.snapshot.memory import Risk
from zeromon.storage.run_store import Store

OPENMETRICS = "application/openmetrics-text;version=1.0.0,text/plain;version=0.0.4;q=0.5"
PARSERS: dict[str, Callable[[str], Iterable[Metric]]] = {
    "": text_string_to_metric_families,
    OPENMETRICS: openmetrics,
}
HOSTILE = st.text(max_size=12) | st.sampled_from(
    ('"', "\\", "\\n", "\n", '"} 1\nx{y="', "\r\n", "a\0b", "\ud800", "é\U0001f600", "\u2028", "#", "")
)
ONCE = ("zeromon_collector_", "zeromon_setting", "zeromon_run_")
"""Families that ranks do not have one by one."""
NUMBERS = st.floats(min_value=0) | st.sampled_from((math.inf, math.nan, 1e-300, 1e300, 2.0**60))


def read(body: bytes, accept: str) -> dict[Any, Any]:
    """Family -> each series with its number."""
    families = {}
    for family in PARSERS[accept](body.decode()):
        names = [(s.name, tuple(sorted(s.labels.items()))) for s in family.samples]
        assert len(set(names)) == len(names), "a series came twice"
        numbers = [repr(float(s.value)) for s in family.samples]
        key = (family.name, family.type, family.unit, family.documentation)
        families[key] = dict(zip(names, numbers, strict=True))
    return families


def both(view: Fixed, accept: str) -> tuple[bytes, bytes]:
    """The same snapshots by prometheus-client and by hand."""
    encode, content_type = choose_encoder(accept)
    opened = content_type.startswith("application/openmetrics")
    theirs = encode(ByClient(view.view, view.health))
    return theirs, Writer().write(view.view, view.health, openmetrics=opened)


@st.composite
def hostile_ranks(draw: Any) -> tuple[RankSnapshot, ...]:
    """Ranks whose names and figures may be anything."""
    one = full_run().ranks[0]
    found = []
    for number in draw(st.lists(st.integers(0, 99999), min_size=1, max_size=3, unique=True)):
        row = one.communication.collectives[0]
        groups = draw(st.lists(HOSTILE, min_size=1, max_size=3, unique_by=printable))
        found.append(
            changed(
                one,
                rank=number,
                node=draw(HOSTILE),
                device=draw(HOSTILE),
                strategy=draw(HOSTILE),
                exposed_ratio=draw(NUMBERS),
                watched_steps=draw(st.integers(0, 2**62)),
                collectives=tuple(replace(row, group=group) for group in groups),
                risks=(Risk(pool="device", ratio=draw(NUMBERS), cause=draw(HOSTILE), steps_left=1.0),),
                phase_seconds={draw(HOSTILE): draw(st.floats(0, 1e9))},
            )
        )
    return tuple(found)


@given(ranks=hostile_ranks(), name=HOSTILE, rule=HOSTILE)
@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
def test_by_hand_and_by_the_client_are_the_same(
    ranks: tuple[RankSnapshot, ...], name: str, rule: str
) -> None:
    """Every family with its type, unit and help, every series, every number; in both formats."""
    finding = Finding(rule=rule, severity="warning", text="")
    view = Fixed(run(*ranks, run=name, findings=(finding,)), run(ranks[0], run=f"{name}-2"))
    for accept in PARSERS:
        theirs, ours = (read(body, accept) for body in both(view, accept))
        assert ours == theirs


def many(ranks: int) -> Fixed:
    """A run of so many ranks in which every metric has a value."""
    one = full_run().ranks[0]
    return Fixed(run(*(replace(one, rank=n) for n in range(ranks))))


@pytest.mark.parametrize("ranks", (1, 64))
@pytest.mark.parametrize("accept", PARSERS, ids=("text", "openmetrics"))
@pytest.mark.parametrize("encoding", ("", "gzip"))
def test_what_is_answered_is_what_is_accepted(ranks: int, accept: str, encoding: str) -> None:
    """Few ranks and many: the same families, the format and the packing that were asked for."""
    view = many(ranks)
    headers, body = Exposition().answer(view.view, view.health, accept, encoding)
    said = dict(headers)
    assert int(said["Content-Length"]) == len(body)
    assert said.get("Content-Encoding", "") == encoding
    text = gzip.decompress(body) if encoding else body
    assert said["Content-Type"].startswith(
        "application/openmetrics-text" if accept else "text/plain; version=0.0.4"
    )
    assert text.endswith(b"# EOF\n") == bool(accept)
    assert b"_created" not in text
    few = read(both(many(1), accept)[0], accept)
    found = read(text, accept)
    assert found.keys() == few.keys()
    for (family, *_), series in found.items():
        times = 1 if family.startswith(ONCE) else ranks
        assert len(series) == times * len(few[next(k for k in few if k[0] == family)])


def test_a_scrape_of_twice_the_ranks_is_twice_the_work() -> None:
    """What is of the whole run (MFU, findings, hangs, deaths) is found once, and not at each rank."""

    def calls(ranks: int) -> int:
        one = changed(full_run().ranks[0], recent=tuple(summary(n) for n in range(1, 30)))
        found = run(*(changed(one, rank=n, failed=n % 2 == 0) for n in range(ranks)))
        writer, count = Writer(), 0
        writer.write((found,), None, openmetrics=False)

        def seen(*_: object) -> None:
            nonlocal count
            count += 1

        sys.setprofile(seen)
        try:
            writer.write((found,), None, openmetrics=False)
        finally:
            sys.setprofile(None)
        return count

    assert calls(200) < 2.1 * calls(100)


def test_prefixes_follow_the_ranks_that_are_there() -> None:
    """What was written before does not show in what is written next, and is not kept for ever."""
    writer, view = Writer(), many(20)
    for ranks in (20, 3, 12):
        snapshot = replace(view.view[0], ranks=view.view[0].ranks[:ranks])
        text = writer.write((snapshot,), view.health, openmetrics=False)
        assert text == Writer().write((snapshot,), view.health, openmetrics=False)
        assert len(writer._known) == ranks
    moving = view.view[0].ranks[0]
    for n in range(600):
        snapshot = run(replace(moving, strategy=f"s{n}"))
        writer.write((snapshot,), view.health, openmetrics=False)
    ((info, *_),) = writer._known.values()
    assert len(info) < 300


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_finds_nothing_to_say() -> None:
    """Its parser is Prometheus's own, and it knows the conventions of names."""
    _, body = Exposition().answer(many(3).view, None, "", "")
    told = subprocess.run(["promtool", "check", "metrics"], input=body, capture_output=True)
    assert (told.returncode, told.stderr.decode(), told.stdout) == (0, "", b"")


def test_a_run_without_ranks_is_no_series_of_it() -> None:
    view = Fixed(run())
    for accept in PARSERS:
        theirs, ours = (read(body, accept) for body in both(view, accept))
        assert ours == theirs
        assert all(name.startswith("zeromon_collector") for name, *_ in ours)


def test_pictures_of_two_collectors_are_not_mixed() -> None:
    first: RunSnapshot = run(rank(0, node="a"))
    second: RunSnapshot = run(rank(0, node="b"))
    writer = Writer()
    assert b'node="a"' in writer.write((first,), None, openmetrics=False)
    text = writer.write((second,), None, openmetrics=False)
    assert b'node="b"' in text
    assert b'node="a"' not in text


def test_a_collector_tells_how_it_does(tmp_path: Path) -> None:
    """Ticks are counted with their time; a live run is counted while it is one."""
    folder = tmp_path / "rings" / "train"
    folder.mkdir(parents=True)
    ring = RingWriter(folder / "rank0.1.ring", rank=0, capacity=64)
    ring.name(NameKind.META, {"rank": 0, "world_size": 1})
    collector = Collector(tmp_path / "rings", Store(tmp_path / "store"))
    before = time.time()
    found = {}
    for ticks in (1, 2):
        collector.tick()
        text = Exposition().answer(collector.view, collector.health, "", "")[1]
        found = {s.name: s.value for f in PARSERS[""](text.decode()) for s in f.samples}
        assert found["zeromon_collector_ticks_total"] == ticks
    assert found["zeromon_collector_runs"] == 1
    assert 0 < found["zeromon_collector_tick_seconds_total"] <= time.time() - before
    assert before <= found["zeromon_collector_last_tick_timestamp_seconds"] <= time.time()
    for path in folder.iterdir():
        path.unlink()
    collector._runs["train"].ended = True
    collector.tick()
    assert collector.health.runs == 0

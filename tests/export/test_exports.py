"""A run in the forms of other tools: what is in it, what is not, and what a hostile name cannot do."""

from __future__ import annotations

import csv
import gzip
import json
import os
import stat
import sys
from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import polars as pl
import pytest
from builders import MS, rank, run, summary
from hypothesis import given, strategies as st
from support import ROOT
from trace_format import checked
from wandb_files import wandb_history

from zeromon.base.errors import ExportError
from zeromon.export import chrome_trace, formats, trackers
from zeromon.export.files import Export, Progress, replacement_file
from zeromon.ring.buffer import NameKind, RingWriter
from zeromon.ring.codes import ExitKind, Flag, Op, Phase
from zeromon.ring.events import Done, Event, Exit, HostSample, Oom, PhaseSpan
from zeromon.ring.slices import RingEvents, read_ring
from zeromon.snapshot import RunSnapshot
from zeromon.storage.step_history.queries import readable_segment_tables
from zeromon.storage.step_history.rows import NAMES, row_of
from zeromon.storage.step_history.writer import Writer, merge_rows, rows_frame

STEPS = 30


def snapshot(**facts: Any) -> RunSnapshot:
    return run(*(rank(n) for n in range(2)), run="train-1", **facts)


def export(
    run: RunSnapshot,
    steps: list[pl.LazyFrame],
    path: Path,
    rings: Sequence[RingEvents] = (),
    *,
    force: bool = False,
) -> Export:
    return Export(run=run, steps=steps, rings=rings, path=path, force=force, progress=Progress(1))


@pytest.fixture
def kept(tmp_path: Path) -> list[pl.LazyFrame]:
    """Thirty steps of two ranks, in a closed segment and a log."""
    writer = Writer(tmp_path / "history", segment_rows=40)
    for step in range(1, STEPS + 1):
        facts = {"idle": step % 8 == 0, "skipped": step == 3, "other_bytes": step}
        one = summary(step, allocated_bytes=-1 if step < 5 else step << 20, **facts)
        writer.append([row_of(n, one, 0) for n in range(2)])
    found, broken = readable_segment_tables(tmp_path / "history")
    assert (len(found), broken) == (2, ())
    return found


# ---- tables ---------------------------------------------------------------------------------------


def test_a_table_has_every_row_with_what_is_unknown_as_null(
    kept: list[pl.LazyFrame], tmp_path: Path
) -> None:
    formats.write_parquet(export(snapshot(), kept, tmp_path / "t.parquet"))
    found = pl.read_parquet(tmp_path / "t.parquet")
    whole = pl.concat(kept).collect()
    assert found.height == 2 * STEPS
    same = [name for name in NAMES if name not in ("flags", "allocated_bytes", "reserved_bytes")]
    assert found.select(same).equals(whole.select(same))
    assert found["idle"].to_list() == [step % 8 == 0 for step in whole["step"]]
    assert found["skipped"].to_list() == [step == 3 for step in whole["step"]]
    known = [None if step < 5 else step << 20 for step in whole["step"]]
    assert found["allocated_bytes"].to_list() == known
    assert found["reserved_bytes"].null_count() == 2 * STEPS
    assert set(found["run"]) == {"train-1"} and set(found["strategy"]) == {"fsdp2"}


def test_the_columns_are_those_of_the_documentation(kept: list[pl.LazyFrame]) -> None:
    page = (ROOT / "docs" / "reference" / "columns.md").read_text()
    names = [line.split("`")[1] for line in page.splitlines() if line.startswith("| `")]
    assert names == formats.export_table(export(snapshot(), kept, Path("t"))).collect_schema().names()


@pytest.mark.parametrize(
    "text", ['=cmd|"/c calc"!A1', "+1+1", "-2", "@SUM(A1)", "\tx", "\rx", "\n=1", 'a,"b"\nc', "ok"]
)
def test_no_cell_of_a_csv_is_a_formula_and_numbers_are_numbers(
    kept: list[pl.LazyFrame], tmp_path: Path, text: str
) -> None:
    """Names come from the run; a spreadsheet must not compute them."""
    hostile = replace(snapshot(), run=text, node=text, ranks=(rank(0, strategy=text), rank(1)))
    early = rows_frame(
        [row_of(0, summary(1, start_ns=-5 * MS), 0)]
    )  # before the epoch: a number below 0
    formats.write_csv(export(hostile, [*kept, early.lazy()], tmp_path / "t.csv"))
    with (tmp_path / "t.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert len(rows) == 2 * STEPS + 1
    for row in rows:
        for name in ("run", "node", "strategy"):
            assert not row[name].startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
        assert row["run"] in (text, f"'{text}")
        assert {row["idle"], row["skipped"]} <= {"true", "false"}
        numbers = {k: v for k, v in row.items() if k.endswith(("_us", "_bytes", "step", "rank"))}
        assert all(value == "" or str(int(value)) == value for value in numbers.values())
    assert rows[-1]["start_us"] == "-5000"


def test_rows_of_many_steps_say_of_how_many(tmp_path: Path, kept: list[pl.LazyFrame]) -> None:
    few = merge_rows(pl.concat(kept).collect())
    formats.write_csv(export(snapshot(), [few.lazy()], tmp_path / "t.csv"))
    assert pl.read_csv(tmp_path / "t.csv")["steps"].to_list() == [16, 14, 16, 14]


# ---- traces ---------------------------------------------------------------------------------------


def traced(
    run: RunSnapshot, found: list[pl.LazyFrame], rings: list[RingEvents], path: Path
) -> list[dict[str, Any]]:
    chrome_trace.write_trace(export(run, found, path, rings))
    return checked(json.loads(path.read_text()))


def test_every_step_is_a_slice_where_it_was(kept: list[pl.LazyFrame], tmp_path: Path) -> None:
    """With its phases as sums, for when they were is not kept, and counters over it."""
    events = traced(snapshot(), kept, [], tmp_path / "t.json")
    slices = [e for e in events if e["ph"] == "X"]
    assert {e["cat"] for e in slices} == {"step"}
    mine = [e for e in slices if e["pid"] == 1]
    assert [e["name"] for e in mine] == [f"step {n}" for n in range(1, STEPS + 1)]
    assert [e["ts"] for e in mine] == [n * 100_000 for n in range(STEPS)]
    assert {e["dur"] for e in mine} == {100_000}
    assert mine[0]["args"]["forward_us"] == 30_000
    assert mine[2]["args"]["skipped"] is True and "idle" not in mine[2]["args"]
    counters = [e for e in events if e["ph"] == "C" and e["pid"] == 1]
    waits = [e for e in counters if "exposed_us" in e["args"]]
    assert len(waits) == STEPS - STEPS // 8  # in a step with idle hooks it is not known
    memory = [e["args"] for e in counters if "rss_bytes" in e["args"]]
    assert memory[0] == {"rss_bytes": 1 << 30}  # what is unknown is not nought
    assert memory[-1] == {"rss_bytes": 1 << 30, "allocated_bytes": STEPS << 20}


def test_a_row_of_many_steps_has_no_slice(kept: list[pl.LazyFrame], tmp_path: Path) -> None:
    """Where its steps began and ended is not known any more; the number of such rows is told."""
    few = merge_rows(pl.concat(kept).collect()).lazy()
    path = tmp_path / "t.json"
    assert chrome_trace.write_trace(export(snapshot(), [few], path)).startswith("4 rows are of many")
    events = checked(json.loads(path.read_text()))
    assert not [e for e in events if e["ph"] == "X"]
    assert [e for e in events if e["ph"] == "C"]


def ring(*events: Event) -> RingEvents:
    """A ring whose clock is that of the rows."""
    return RingEvents(
        rank=0, wall_minus_mono_ns=0, events=events, groups={1: "world"}, units={7: "layers.0"},
        texts={3: "ValueError: x"},
    )  # fmt: skip


def test_the_last_steps_have_their_phases_and_collectives_with_their_moments(
    kept: list[pl.LazyFrame], tmp_path: Path
) -> None:
    """Overlapping collectives in lanes of their own; microseconds since the first step of the run."""

    def done(start: int, end: int, blocked: int, flags: int = 0) -> Done:
        return Done(end, Op.ALL_GATHER, Phase.FORWARD, flags, 1, 7, 99, start, blocked, 5)

    events = traced(
        snapshot(),
        kept,
        [
            ring(
                PhaseSpan(130 * MS, Phase.FORWARD, 0, 100 * MS),
                PhaseSpan(140 * MS, Phase.BACKWARD, Flag.INFERRED, 130 * MS),
                done(105 * MS, 115 * MS + 250, 4 * MS),
                done(110 * MS, 120 * MS, 0),
                done(111 * MS, 121 * MS, 0, Flag.FAILED),
                HostSample(125 * MS, 5 << 20, -1, -1),
                Oom(126 * MS, 10, 20, 5),
                Exit(127 * MS, ExitKind.EXCEPTION, 3),
            )
        ],
        tmp_path / "t.json",
    )
    of_kind: dict[str, list[dict[str, Any]]] = {}
    for event in events:
        of_kind.setdefault(event.get("cat", event["ph"]), []).append(event)
    phases = [(e["name"], e["ts"], e["dur"], e["args"]) for e in of_kind["phases"]]
    assert phases == [
        ("forward", 0, 30_000, {}), ("backward", 30_000, 10_000, {"inferred": True}),
    ]  # fmt: skip
    first, second = sorted(of_kind["communication"], key=lambda e: e["ts"])
    assert (first["ts"], first["dur"]) == (5_000, 10_000.25)
    assert first["tid"] != second["tid"]
    assert first["args"]["unit"] == "layers.0" and first["args"]["group"] == "world"
    (wait,) = of_kind["waits for communication"]
    assert (wait["ts"], wait["dur"]) == (11_000.25, 4_000)
    assert {e["name"] for e in of_kind["i"]} == {"out of memory", "end: exception"}
    assert of_kind["i"][-1]["args"] == {"text": "ValueError: x"}
    assert [e["args"] for e in of_kind["C"] if "sampled" in e["name"]] == [{"rss_bytes": 5 << 20}]


@given(
    st.lists(st.tuples(st.integers(0, 100), st.integers(1, 20)), max_size=40).map(
        lambda spans: [(float(a), float(b), "x", {}) for a, b in spans]
    )
)
def test_lanes_keep_all_slices_apart_and_are_as_few_as_can_be(slices: list[chrome_trace.Slice]) -> None:
    found = chrome_trace.spread_over_lanes(slices)
    assert sorted(x[:2] for lane in found for x in lane) == sorted(x[:2] for x in slices)
    for lane in found:
        assert all(a[0] + a[1] <= b[0] for a, b in pairwise(lane))
    moments = {s[0] for s in slices}
    at_once = max((sum(a <= t < a + b for a, b, *_ in slices) for t in moments), default=0)
    assert len(found) == at_once


def test_hostile_names_stay_text_and_a_packed_trace_is_the_same(
    kept: list[pl.LazyFrame], tmp_path: Path
) -> None:
    evil = '"},{"ph":"X","ts":1e999\n\\u0000</script>'
    hostile = replace(snapshot(), run=evil, node=evil, ranks=(rank(0, strategy=evil), rank(1)))
    plain, packed = tmp_path / "t.json", tmp_path / "t.json.gz"
    events = traced(hostile, kept, [], plain)
    assert evil in next(e["args"]["name"] for e in events if e["name"] == "process_name")
    chrome_trace.write_trace(export(hostile, kept, packed))
    assert gzip.decompress(packed.read_bytes()) == plain.read_bytes()


def test_a_ring_is_read_with_its_names(tmp_path: Path) -> None:
    writer = RingWriter(tmp_path / "rank3.ring", rank=3, capacity=64, names_size=4096)
    group = writer.name(NameKind.GROUP, {"label": "world", "size": 2})
    writer.name(NameKind.META, {"strategy": "ddp"})
    unit = writer.name(NameKind.UNIT, {"fqn": "layers.0"})
    from zeromon.ring.codes import Kind
    from zeromon.ring.events import pack_head

    writer.write(5, pack_head(Kind.HOST), 0, 7, 8, 9, 0)
    found = read_ring(tmp_path / "rank3.ring")
    assert (found.rank, found.groups, found.units) == (3, {group: "world"}, {unit: "layers.0"})
    assert list(found.events) == [HostSample(5, 7, 8, 9)]


# ---- boards ---------------------------------------------------------------------------------------


def test_scalars_are_seconds_and_bytes_and_only_what_is_known() -> None:
    row = dict(zip(NAMES, row_of(0, summary(7, idle=False), 0), strict=True))
    found = dict(trackers.step_scalars(row))
    assert found["time/step_seconds"] == 0.1
    assert found["communication/exposed_share"] == pytest.approx(0.1)
    assert found["memory/rss_bytes"] == 1 << 30
    assert "memory/allocated_bytes" not in found
    idle = dict(trackers.step_scalars(row | {"flags": 1}))
    assert not {"communication/exposed_seconds", "communication/exposed_share"} & idle.keys()
    assert idle["time/step_seconds"] == 0.1


def test_the_scalars_of_a_step_come_together_also_over_the_end_of_a_segment() -> None:
    """And the steps that a restart counts anew come again."""

    def rows(*keys: tuple[int, int]) -> pl.LazyFrame:
        return rows_frame([row_of(r, summary(step), 0) for step, r in keys]).lazy()

    pieces = [rows((1, 0), (1, 1), (2, 1)), rows((2, 0), (1, 0))]
    found = list(trackers.group_by_step(export(snapshot(), pieces, Path("t")).rows()))
    assert [step for step, _ in found] == [1, 2, 1]
    ranks = [{row["rank"] for row in together} for _, together in found]
    assert ranks == [{0, 1}, {0, 1}, {0}]


def test_a_boards_id_is_of_one_run_only() -> None:
    assert trackers.valid_wandb_id("train-1") == "train-1"
    ids = {trackers.valid_wandb_id(run) for run in ("a.b", "a-b", "a/b", "../../a", "é", "x" * 200)}
    assert len(ids) == 6
    assert all(set(i) <= set(map(chr, range(128))) and "/" not in i and len(i) <= 73 for i in ids)


def test_tensorboard_reads_back_what_was_written(kept: list[pl.LazyFrame], tmp_path: Path) -> None:
    accumulator = pytest.importorskip(
        "tensorboard.backend.event_processing.event_accumulator", reason="tensorboard is missing"
    )
    for force in (False, True):  # the second replaces the first
        trackers.write_tensorboard(export(snapshot(), kept, tmp_path / "tb", force=force))
    job = accumulator.EventAccumulator(str(tmp_path / "tb" / "job"))
    job.Reload()
    for tag, value in trackers.ledger_scalars(snapshot()).items():
        assert [(e.step, round(e.value, 4)) for e in job.Scalars(tag)] == [(STEPS, round(value, 4))]
    for number in range(2):
        found = accumulator.EventAccumulator(str(tmp_path / "tb" / f"rank{number}"))
        found.Reload()
        steps = found.Scalars("time/step_seconds")
        assert [event.step for event in steps] == list(range(1, STEPS + 1))
        assert {round(event.value, 6) for event in steps} == {0.1}
        assert steps[0].wall_time == pytest.approx(0.2)
        assert len(found.Scalars("memory/allocated_bytes")) == STEPS - 4
        assert len(found.Scalars("communication/exposed_share")) == STEPS - STEPS // 8
    with pytest.raises(ExportError, match="holds an export already"):
        trackers.write_tensorboard(export(snapshot(), kept, tmp_path / "tb", force=False))


def test_wandb_keeps_an_offline_run_with_every_step(
    kept: list[pl.LazyFrame], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("wandb", reason="wandb is missing")
    monkeypatch.setattr(trackers, "_SCALARS", trackers._SCALARS[:2])
    for force in (False, True):
        trackers.write_wandb(export(snapshot(), kept, tmp_path / "wb", force=force))
    (path,) = (tmp_path / "wb").glob("wandb/offline-run-*-train-1/*.wandb")
    history = wandb_history(path)
    ledger = trackers.ledger_scalars(snapshot())
    assert {key: history[-1].get(key) for key in ledger} == pytest.approx(ledger)
    assert history.pop()["step"] == STEPS
    assert [values["step"] for values in history] == list(range(1, STEPS + 1))
    assert all(values["rank1/time/step_seconds"] == 0.1 for values in history)
    with pytest.raises(ExportError, match="holds an export already"):
        trackers.write_wandb(export(snapshot(), kept, tmp_path / "wb", force=False))


@pytest.mark.parametrize(
    ("module", "package"), [("tensorboard.compat.proto.event_pb2", "tensorboard"), ("wandb", "wandb")]
)
def test_what_is_not_installed_is_said_with_the_way_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, module: str, package: str
) -> None:
    monkeypatch.setitem(sys.modules, module, None)
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ExportError, match=f"needs {package}, which is not installed") as caught:
        if package == "wandb":
            trackers.write_wandb(export(snapshot(), [], tmp_path / "out", force=False))
        else:
            trackers.write_tensorboard(export(snapshot(), [], tmp_path / "out", force=False))
    assert caught.value.hint == f"pip install {package}"
    assert not (tmp_path / "out").exists()


# ---- files ----------------------------------------------------------------------------------------


def test_a_file_is_whole_private_and_replaces_only_when_asked(tmp_path: Path) -> None:
    path = tmp_path / "out.csv"
    with replacement_file(path, force=False) as temporary:
        temporary.write_text("one")
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    with pytest.raises(ExportError, match="exists already"), replacement_file(path, force=False):
        raise AssertionError("not reached")
    with pytest.raises(ZeroDivisionError), replacement_file(path, force=True) as temporary:
        temporary.write_text("half")
        raise ZeroDivisionError
    assert path.read_text() == "one"
    with replacement_file(path, force=True) as temporary:
        temporary.write_text("two")
    assert path.read_text() == "two"
    assert os.listdir(tmp_path) == ["out.csv"]


def test_a_place_that_cannot_be_written_is_an_error_with_its_name(tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere" / "x.csv"
    with (
        pytest.raises(ExportError, match=r"cannot write .*nowhere"),
        replacement_file(nowhere, force=False),
    ):
        raise AssertionError("not reached")
    (tmp_path / "folder").mkdir()
    folder = tmp_path / "folder"
    with (
        pytest.raises(ExportError, match=r"cannot write .*folder"),
        replacement_file(folder, force=True) as one,
    ):
        one.write_text("x")
    assert os.listdir(tmp_path) == ["folder"]

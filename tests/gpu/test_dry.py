"""The GPU suite where there is no GPU: it says so, and its own code runs."""

from __future__ import annotations

import ast
import inspect
import json
import tarfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import builders
import pytest
import rows
import suite
import torch
from builders import changed, rank
from evidence_pages import read_entries
from suite import Bench, Check, NotHere, Outcome, Row

from zeromon.snapshot import Hang, RunSnapshot
from zeromon.snapshot.communication import HangKind, Ras

HERE = Path(__file__).resolve().parent

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="make test-gpu runs here")


def test_without_a_gpu_it_ends_with_2(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """Neither a success nor a skip that nobody reads."""
    assert suite.main(["--out", str(tmp_path)]) == 2
    assert "there is no GPU" in capsys.readouterr().err


def test_every_row_of_the_table_is_there() -> None:
    numbers = [row.number for row in suite.ROWS]
    assert {number.rstrip("b") for number in numbers} >= {str(n) for n in range(1, 14)}
    assert len(set(numbers)) == len(numbers)
    assert all(row.part in ("1", "2", "bench") for row in suite.ROWS)
    assert all(row.seconds < suite.SECONDS for row in suite.ROWS)


def test_every_program_that_a_row_starts_takes_its_options() -> None:
    """The processes run elsewhere, so a wrong name would only be found on the GPU."""
    programs = {
        node.name: {argument.arg for argument in node.args.args}
        for node in ast.parse((HERE / "ranks.py").read_text()).body
        if isinstance(node, ast.FunctionDef)
    }
    own = set(inspect.signature(Bench.run).parameters)
    calls = [
        node
        for node in ast.walk(ast.parse((HERE / "rows.py").read_text()))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "bench.run"
    ]
    assert len(calls) > 10
    for call in calls:
        assert isinstance(call.args[0], ast.Constant)
        options = {keyword.arg for keyword in call.keywords if keyword.arg} - own
        assert options <= programs[str(call.args[0].value)], ast.unparse(call)


def test_the_known_truth_on_the_virtual_device() -> None:
    """The checks of row 1, as they are judged on a GPU, on the agent's own timer."""
    bench: Any = SimpleNamespace(dry=True, run=lambda *_, **__: SimpleNamespace(facts=[{"cases": []}]))
    for name in ("check", "near"):
        setattr(bench, name, getattr(Bench, name).__get__(bench))
    bench.figure = Bench.figure
    checks = list(rows.known_truth(bench))
    judged = [check for check in checks if check.verdict != "figure"]
    assert len(judged) == 8 and {check.verdict for check in judged} == {"pass"}
    assert [check.measured for check in judged[::2]] == ["10 ms", "5 ms", "0 ms", "0 ms"]


def test_a_capture_on_the_virtual_device() -> None:
    bench: Any = SimpleNamespace(dry=True)
    bench.check = Bench.check.__get__(bench)
    (check,) = rows.virtual_captures(bench)
    assert check.verdict == "pass"


@pytest.mark.parametrize(
    ("measured", "expected", "verdict"),
    [(1.04, 1.0, "pass"), (1.06, 1.0, "FAIL"), (0.01, 0.0, "pass"), (None, 1.0, "FAIL"),
     (1.0, None, "FAIL")],
)  # fmt: skip
def test_a_figure_is_near_the_truth(measured: Any, expected: Any, verdict: str) -> None:
    bench: Any = SimpleNamespace(dry=False)
    bench.check = Bench.check.__get__(bench)
    assert Bench.near(bench, "", measured, expected, ratio=0.05, absolute=0.02).verdict == verdict
    bench.dry = True
    assert Bench.near(bench, "", measured, expected, ratio=0.05).verdict == "ran"


def test_ranks_that_the_suite_ends_are_not_dead_members() -> None:
    """Row 11 takes what was said while they hung; a rank that exits may end both before."""

    def snapshot(kind: str, failed: bool, ras: Ras | None = None) -> RunSnapshot:
        ranks = [changed(rank(number), failed=failed, watched_steps=5) for number in (0, 1)]
        hang = Hang(
            kind=HangKind(kind or "a member is dead"), op="all_reduce", group="world", group_id="world",
            sequence=6, nbytes=4, seconds=11.0, waiting=(0,), missing=(1,), dead=(), elsewhere=(),
            calls=(),
        )  # fmt: skip
        return replace(builders.run(*ranks), hangs=(hang,) if kind else (), ras=ras)

    def run(*_: Any, fault: str, seen: Any, **__: Any) -> Any:
        if fault != "exit":
            kind = rows.FAULTS[fault]
            assert seen(snapshot(kind, False), []) is (fault != "sleep"), "NCCL is asked"
            assert seen(snapshot(kind, False, Ras(note="it is off")), [])
        return SimpleNamespace(snapshot=snapshot("", True))

    bench: Any = SimpleNamespace(dry=False, run=run, figure=Bench.figure)
    bench.check = Bench.check.__get__(bench)
    checks = list(rows.hangs(bench))
    said = next(check for check in checks if check.verdict == "figure")
    assert [check.verdict for check in checks if check is not said] == ["pass"] * len(rows.FAULTS)
    assert said.measured.endswith("NCCL's view is n/a: it is off")


def outcomes() -> list[Outcome]:
    """Rows that pass, fail, raise, cannot tell and take too long, one after the other."""
    now = [0.0]

    def good(_: Any) -> Iterator[Check]:
        yield Check("a", "1", "1", "pass")

    def bad(_: Any) -> Iterator[Check]:
        yield Check("a|b", "1", "2", "FAIL")

    def broken(_: Any) -> Iterator[Check]:
        yield from good(_)
        raise ValueError("of the row")

    def elsewhere(_: Any) -> Iterator[Check]:
        raise NotHere("no such library")
        yield

    def slow(_: Any) -> Iterator[Check]:
        for _ in range(9):
            now[0] += 40
            yield from good(_)

    made = [
        Row(str(n), f.__name__, "1", 60.0, f)
        for n, f in enumerate((good, bad, broken, elsewhere, slow, good))
    ]
    last = Row("6", "late", "1", 60.0, good)
    bench = SimpleNamespace(ends=100.0)
    return list(suite.carried_out([*made, last], bench, clock=lambda: now[0]))


def test_a_row_that_fails_stops_no_other(capsys: pytest.CaptureFixture[str]) -> None:
    verdicts = [one.verdict for one in outcomes()]
    assert verdicts == ["pass", "FAIL", "error", "n/a", "out of time", "out of time", "out of time"]
    assert "of the row" in capsys.readouterr().err


def test_the_report_is_written_and_published(tmp_path: Path) -> None:
    """JSON and Markdown after each row; figures of a dry run, or of no commit, never reach the page."""
    page, data = tmp_path / "gpu.md", tmp_path / "data"
    data.mkdir()
    page.write_text("before\n<!-- begin: gpu.* -->\nold\n<!-- end -->\nafter\n")
    facts = {"device": "NVIDIA H100", "torch": "2.11.0", "date": "2026-11-27", "commit": "0123abcd"}
    suite.write_report(tmp_path, "1", facts, outcomes())
    assert "| a/b | 1 | 2 | FAIL |" in (tmp_path / "figures-1.md").read_text()
    suite.publish([tmp_path / "figures-1.json"], tmp_path)
    text = page.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "2026-11-27, 0123abcd: NVIDIA H100, torch 2.11.0." in text
    assert "| 1 | bad | 0 of 1 | FAIL: a/b: 1, expected 2 |" in text
    rows = read_entries("gpu", tmp_path)["h100"]["rows"]
    assert ["3", "elsewhere", "no such library", "0 s", "", "n/a"] in rows
    assert sum(row[5] == "pass" and row[0] == "" for row in rows) > 3
    for wrong in ({"device": "none"}, {"commit": ""}, {"commit": "0123abcd-dirty"}):
        suite.write_report(tmp_path, "wrong", facts | wrong, outcomes())
        with pytest.raises(SystemExit, match=r"dry|commit"):
            suite.publish([tmp_path / "figures-wrong.json"], tmp_path)
    assert page.read_text() == text


def test_the_page_has_the_rows_of_the_suite() -> None:
    """The stored table is what the suite writes, of a GPU, and of rows that exist."""
    entries = read_entries("gpu")
    assert entries
    for entry in entries.values():
        assert tuple(entry["head"]) == suite.HEAD and entry["machine"].startswith("NVIDIA")
        assert {row[0] for row in entry["rows"]} - {""} <= {row.number for row in suite.ROWS}


def test_a_dry_run_in_this_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Collection, imports, a collector, a process that ends, one that does not, the report."""

    def row(bench: Bench) -> Iterator[Check]:
        bench.keep("kept.json", b"{}")
        done = bench.run("memory", watched=False, pause=0.0)
        yield bench.check("facts", done.facts[0]["asked"], 1 << 50, len(done.facts) == 1, here=True)
        with pytest.raises(suite.OutOfTime):
            bench.run("memory", watched=False, pause=60.0, seconds=0.5)

    monkeypatch.setattr(suite, "ROWS", [*suite.ROWS, Row("live", "live", "1", 120.0, row)])
    assert suite.main(["--dry", "--rows", "13,14,live", "--out", str(tmp_path)]) == 0
    written = json.loads((tmp_path / "figures-all.json").read_text())
    assert [one["verdict"] for one in written["rows"]][1:] == ["pass", "pass"]
    assert written["machine"]["dry"] == "yes"
    with tarfile.open(tmp_path / "fixtures.tgz") as archive:
        assert archive.getnames() == ["kept.json"]

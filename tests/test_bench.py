"""Two results of `make bench` side by side."""

from __future__ import annotations

import importlib.util
import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from evidence_pages import EVIDENCE, read_entries
from support import ROOT


@pytest.fixture(scope="module")
def bench() -> ModuleType:
    folder = ROOT / "tests" / "bench"
    spec = importlib.util.spec_from_file_location("bench_run", folder / "run.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(folder))
    try:
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(folder))
    return module


def result(**figures: tuple[float, str, float | None]) -> dict[str, Any]:
    rows = [
        {"name": name, "value": value, "unit": "s", "better": better, "noise": noise}
        for name, (value, better, noise) in figures.items()
    ]
    return {"commit": "a", "versions": {}, "machine": {}, "figures": rows}


@pytest.mark.parametrize(
    ("better", "noise", "after", "verdict"),
    [
        ("lower", 0.1, 1.3, "worse: 1"),
        ("lower", 0.1, 1.1, "within the noise: 1"),
        ("lower", 0.1, 0.7, "better: 1"),
        ("higher", 0.1, 0.7, "worse: 1"),
        ("zero", 0.1, -1.3, "worse: 1"),
        ("zero", 0.1, -1.0, "within the noise: 1"),
        ("lower", 0.0, 1.001, "worse: 1"),  # a seeded figure has none
        ("lower", None, 1.3, "within the noise: 1"),  # 20 % is assumed of each
        ("lower", None, 1.6, "worse: 1"),
    ],
)
def test_what_differs_by_more_than_the_noise_of_both_is_named(
    bench: ModuleType, better: str, noise: float | None, after: float, verdict: str
) -> None:
    lines, worse = bench.compared(result(one=(1.0, better, noise)), result(one=(after, better, noise)))
    assert verdict in lines
    assert worse == (verdict == "worse: 1")


def test_published_figures_replace_a_table(bench: ModuleType, tmp_path: Path) -> None:
    """With their commit and machine; a bench without a table is named."""
    shutil.copytree(EVIDENCE, tmp_path, dirs_exist_ok=True)
    found = result(**{"census: plain": (3.25, "lower", 0.5), "dash: a tick": (1.0, "lower", None)}) | {
        "date": "2030-01-02T03:04:05Z", "commit": "0123abcd" * 5, "versions": {"torch": "9.9"},
        "machine": {"cpu": "a CPU", "cores": 4}, "minutes": {"bench_census.py": 1, "bench_dash.py 2": 1},
    }  # fmt: skip
    assert bench.publish(found, tmp_path) == ["bench_dash.py"]
    page = (tmp_path / "cost.md").read_text()
    assert "| plain | 3.25 s | 0.5 |" in page
    assert "2030-01-02, 0123abcd: a CPU, 4 cores, torch 9.9." in page
    with pytest.raises(SystemExit, match="commit"):
        bench.publish(found | {"commit": "0123abcd with changes"}, tmp_path)


def test_every_table_of_a_bench_is_there(bench: ModuleType) -> None:
    folder = ROOT / "tests" / "bench"
    for title, place in bench.PUBLISHED.items():
        subject, _, name = place.partition(".")
        tool = read_entries(subject)[name]["tool"]
        assert Path(tool).stem.removeprefix("bench_") == title
        assert (folder / f"bench_{title}.py").exists() or (folder / "truth" / f"{title}.py").exists()


def test_a_figure_that_only_one_has_and_another_machine_are_named(bench: ModuleType) -> None:
    one, other = result(a=(1.0, "lower", 0.0)), result(b=(1.0, "lower", 0.0))
    lines, worse = bench.compared(one, other | {"machine": {"cores": 8}})
    assert {"only in the first: a", "only in the second: b"} <= {*lines}
    assert "machine: {} / {'cores': 8}" in lines and not worse


def test_the_noise_of_several_rounds_is_what_they_differ_by(bench: ModuleType) -> None:
    (row,) = result(a=(1.0, "lower", None))["figures"]
    rounds = [row | {"value": value} for value in (1.0, 1.3, 1.1)]
    assert bench.merged("a", rounds)["value"] == 1.1
    assert bench.merged("a", rounds)["noise"] == pytest.approx(0.3)
    assert bench.merged("a", [row, row])["noise"] == bench.LEAST
    assert bench.merged("a", [row])["noise"] is None


def test_every_bench_of_the_list_is_a_file(bench: ModuleType) -> None:
    for one in (*bench.OURS, *bench.PEERS):
        assert (bench.HERE / one.command.split()[0]).is_file()
    assert sum(one.minutes for one in bench.OURS) < 22

"""Two results of `make bench` side by side."""

from __future__ import annotations

import importlib.util
import sys
from types import ModuleType
from typing import Any

import pytest
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

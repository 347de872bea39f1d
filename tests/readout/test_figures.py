"""The catalogue of figures, and the metrics that carry them."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator

import pytest
from builders import device_memory, full_run, rank
from grafana_boards.boards import BOARDS

from zeromon.export.prometheus.metrics import METRICS
from zeromon.export.prometheus.rules import AGGREGATES, Thresholds, all_alerts
from zeromon.readout.figures import (
    BYTES,
    COUNT,
    FIELD_OF_METRIC,
    FIGURES,
    MAPPED,
    MEMORY,
    ON_NODES,
    OVER_RANKS,
    RATIO,
    SECONDS,
    SPREAD,
    STEP,
    Figure,
    held_bytes,
)
from zeromon.readout.tables import NODE_COLUMNS, RANK_COLUMNS
from zeromon.snapshot import RankSnapshot
from zeromon.snapshot.memory import Risk
from zeromon.snapshot.run import FleetNode
from zeromon.sources.prometheus import decode as ranks, promql
from zeromon.tui.columns import COMPARED
from zeromon_dashboard import runs_page
from zeromon_dashboard.pages import ranks as ranks_page

SPECS = {spec.name: spec for spec in METRICS}
KNOWN = set(SPECS) | {
    f"{spec.name}_{part}"
    for spec in METRICS
    if spec.kind == "histogram"
    for part in ("sum", "count", "bucket")
}


def _full() -> RankSnapshot:
    return full_run().ranks[0]


@pytest.mark.parametrize("figure", FIGURES, ids=lambda figure: figure.name)
def test_a_metric_that_carries_a_figure_has_its_unit(figure: Figure) -> None:
    for name in figure.metrics:
        spec = SPECS[f"zeromon_{name}"]
        assert spec.unit == figure.unit.name or figure.unit is COUNT, name


@pytest.mark.parametrize(
    "figure", [f for f in FIGURES if f.metrics and f is not STEP], ids=lambda figure: figure.name
)
def test_a_metric_has_the_value_that_views_show(figure: Figure) -> None:
    """STEP is a histogram: what it shows is a rate."""
    one = full_run()
    shown = one.ranks[0]
    read = SPECS[f"zeromon_{figure.metrics[0]}"].rows
    values = [value for _, value in read(one)(shown) if value is not None]
    assert values and figure.of_rank(shown) == pytest.approx(max(values))


def test_names_and_fields_are_unique() -> None:
    assert len({figure.name for figure in FIGURES}) == len(FIGURES)
    assert len({figure.field for figure in OVER_RANKS}) == len(OVER_RANKS)
    assert set(MAPPED) <= set(ON_NODES) and set(SPREAD) <= set(OVER_RANKS)


def test_a_node_has_every_figure_that_says_so() -> None:
    node = FleetNode(node="a", address="a:1", ranks=1, up=1, failed=0, step_seconds=0.5)
    assert STEP.of_node(node) == 0.5
    assert all(figure.of_node(node) is None for figure in ON_NODES if figure is not STEP)


def test_memory_is_that_of_the_device_where_there_is_one() -> None:
    assert held_bytes(rank(memory_device=device_memory(reserved_bytes=7))) == 7
    assert held_bytes(rank(memory_device=None, rss_bytes=5)) == 5
    assert held_bytes(rank(memory_device=None, rss_bytes=-1)) is None
    assert MEMORY.text(rank(memory_device=None, rss_bytes=-1)) == "n/a"


@pytest.mark.parametrize(
    ("unit", "value", "scaled", "text"),
    [(SECONDS, 0.25, 250.0, "250.0 ms"), (RATIO, 0.5, 50.0, "50.0 %"), (BYTES, 1 << 30, 1.0, "1.0 GiB")],
)  # fmt: skip
def test_units_for_charts_and_for_people(unit: object, value: float, scaled: float, text: str) -> None:
    assert unit.scaled(value) == scaled  # type: ignore[attr-defined]
    assert unit.scaled(None) is None  # type: ignore[attr-defined]
    assert unit.text(value) == text  # type: ignore[attr-defined]


# ---- views show the same figure --------------------------------------------------------------------


def test_the_terminal_filter_and_table_read_the_same_value() -> None:
    one = rank(
        exposed_ratio=0.3, exposed_seconds=0.03, overlap_ratio=0.6, median_seconds=0.1,
        late_seconds=0.01, wait_seconds=0.02, memory_device=device_memory(),
        risks=(Risk(pool="device", ratio=0.6, cause="none"),),
    )  # fmt: skip
    columns = {column.name: column.read(one) for column in RANK_COLUMNS}
    assert columns["share"] == pytest.approx(COMPARED["exposed"](one) / 100)  # type: ignore[operator]
    assert columns["risk"] == pytest.approx(COMPARED["risk"](one) / 100)  # type: ignore[operator]
    assert columns["memory"] == pytest.approx(COMPARED["memory"](one) * 2**30)  # type: ignore[operator]
    for name in ("step", "late"):
        assert columns[name] == COMPARED[name](one)
    assert columns["waits"] == COMPARED["wait"](one)


def test_file_headings_and_page_fields_stay_as_users_know_them() -> None:
    assert [column.export_heading for column in RANK_COLUMNS] == [
        "rank", "node", "state", "steps", "step_seconds",
        "exposed_seconds", "share_ratio",
        "overlap_ratio", "late_seconds", "waits_seconds", "memory_bytes", "risk_ratio", "device",
        "unit",
    ]  # fmt: skip
    assert [column.export_heading for column in NODE_COLUMNS] == [
        "node", "ranks", "state", "step_seconds", "share_ratio", "late_seconds", "waits_seconds",
        "memory_bytes", "risk_ratio",
    ]  # fmt: skip
    of_ranks = {column["field"] for column in ranks_page.COLUMNS}
    assert of_ranks >= {"step", "exposed", "share", "overlap", "memory", "risk", "late", "waits"}
    assert {column["field"] for column in runs_page.COLUMNS} >= {"step", "exposed", "memory"}
    assert set(COMPARED) == {
        "rank", "steps", "step", "exposed", "exposed_seconds", "overlap", "late", "wait", "waits",
        "memory", "headroom", "risk",
    }  # fmt: skip


# ---- metric names ----------------------------------------------------------------------------------


def _named(expression: str) -> set[str]:
    return set(re.findall(r"zeromon_[a-z]\w*", expression))


def _queries() -> Iterator[str]:
    run = promql.Choice("r")
    for name, query in inspect.getmembers(promql, inspect.isfunction):
        wanted = list(inspect.signature(query).parameters)
        if (
            query.__module__ != promql.__name__
            or name.startswith("_")
            or wanted[:1] not in ([], ["run"])
        ):
            continue
        more = {"window": "2m", "seconds": 600, "step": 15}
        made = query(*[run] * bool(wanted), **{k: v for k, v in more.items() if k in wanted})
        if isinstance(made, str):
            yield made
    yield promql.columns_of_ranks(run, detail=True)


def test_queries_ask_for_metrics_that_are_exported() -> None:
    queries = list(_queries())
    named = set().union(*map(_named, queries))
    assert len(queries) >= 12 and len(named) > 50
    assert named <= KNOWN


def test_the_decoder_reads_metrics_that_are_exported() -> None:
    """Every metric that it takes from a rank's samples, by the names in its source."""
    readers = {"number", "whole", "count", "label", "by"}
    named = {
        str(call.args[0].value)
        for module in (ranks,)
        for call in ast.walk(ast.parse(inspect.getsource(module)))
        if isinstance(call, ast.Call) and isinstance(call.func, ast.Attribute)
        and call.func.attr in readers and call.args and isinstance(call.args[0], ast.Constant)
    }  # fmt: skip
    assert len(named) > 40
    assert {f"zeromon_{name}" for name in named} <= KNOWN
    assert {f"zeromon_{name}" for name in FIELD_OF_METRIC} <= set(SPECS)


def test_the_decoder_reads_nothing_that_no_query_asks_for() -> None:
    asked = set().union(*map(_named, _queries()))
    assert {f"zeromon_{name}" for name in FIELD_OF_METRIC} - {"zeromon_step_seconds"} <= asked


def test_rules_alerts_and_dashboards_speak_of_metrics_that_are_exported() -> None:
    named = set().union(
        *(_named(aggregate.each) for aggregate in AGGREGATES),
        *(_named(alert.expr) for alert in all_alerts(Thresholds())),
        *(_named(query.expr) for board in BOARDS for row in board.rows for panel in row.panels
          for query in panel.queries),
    )  # fmt: skip
    assert len(named) > 50
    assert named <= KNOWN

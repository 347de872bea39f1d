"""One term for one thing, in the code and in every text that a user reads.

:data:`MODULES` and :data:`NAMES` list names that the code had before it used the terms of
docs/reference/glossary.md. :data:`PHRASES` lists expressions that a PyTorch engineer would have to
translate. Each entry has its replacement, which the failure prints. Common words are on no list.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from zeromon.base import errors
from zeromon.cli import build_parser
from zeromon.diagnosis.rule import all_pages
from zeromon.export.prometheus.metrics import METRICS

ROOT = Path(__file__).resolve().parents[2]
PACKAGES = ("zeromon", "agents/zeromon_agents", "dashboard/zeromon_dashboard")
SOURCES = sorted(file for package in PACKAGES for file in (ROOT / package).rglob("*.py"))

MODULES = {
    "boards": "tools.grafana_boards",
    "configs": "memory.config_files",
    "exchange": "collector.cluster_client",
    "expected": "memory.reconcile",
    "found": "observe.discovery",
    "halves": "tui.draw.bars",
    "jobs": "attach.rank_processes",
    "joining": "attach.loader",
    "limits": "compare.thresholds",
    "links": "probes.network",
    "look": "tui.display_options",
    "measures": "compare.figures",
    "meeting": "runtime.rendezvous",
    "model_facts": "observe.model_metadata",
    "moments": "storage.snapshot_log",
    "nodes": "collector.cluster",
    "notes": "tui.event_log",
    "parts": "tui.step_breakdown",
    "pending": "observe.device_timer",
    "picture": "snapshot",
    "pressure": "probes.cpu_pressure",
    "remedies": "diagnosis.rules",
    "scene": "tui.view_model",
    "sheet": "tui.export",
    "skew": "diagnosis.arrivals",
    "standing": "observe.stall_detector",
    "tones": "tui.styles",
    "totals": "fold.checkpoint",
    "tracefile": "traces.kineto",
    "traffic": "fold.communication",
    "turns": "runtime.safe_point",
    "unseen": "observe.untraced",
    "wanted": "tui.rank_filter",
    "where": "dashboard.url_state",
    "words": "tui.status_text",
}
"""A former module name, and the module that has its content."""

NAMES = {
    "Arrived": "SnapshotArrived",
    "Away": "RemoteRank",
    "Band": "MinMedianMax",
    "Beat": "Heartbeat",
    "Board": "Dashboard or RendezvousStore",
    "Card": "NodeInfo",
    "Exchange": "ClusterSync",
    "Facts": "Metadata",
    "Found": "DiscoveredObjects",
    "Head": "Leader",
    "Joint": "PartialArrival",
    "Look": "DisplayOptions",
    "Measured": "RunFigures",
    "Moment": "LoggedSnapshot",
    "Note": "LogEntry",
    "Offset": "ClockOffset",
    "Peer": "PeerRank",
    "Picture": "Snapshot",
    "Pictures": "Snapshots",
    "Place": "RankInfo or ParkedThread",
    "Rest": "Unattributed",
    "Scene": "ViewModel",
    "Settled": "FindingDebouncer",
    "Sheet": "TableExport",
    "Skew": "ArrivalSkew",
    "Standing": "StallDetector",
    "Stretch": "StepRange",
    "Told": "Notification",
    "Totals": "Checkpoint",
    "Traffic": "CollectiveStats",
    "TrafficRow": "CollectiveStatsRow",
    "Unseen": "UntracedCollectives",
    "Where": "Route",
    "plain_bytes_of": "analytical_bytes",
    "elsewhere": "remote_members",
    "gravest": "most_severe",
    "in_words": "sentence",
    "introduces": "is_node_leader",
    "outside_of": "run_when_not_executing",
    "take_over": "restore",
    "told_apart": "dedupe_jobs",
    "toned": "styled",
}
"""A former name of a class or function, and its present name."""

PHRASES = {
    r"\bgoodbye\b": "final record",
    r"\bgrave(st|r)?\b": "severe, most severe",
    r"\bforet(ell|old|ells)\b": "predict, forecast",
    r"\bpictures?\b": "snapshot, chart, image",
    r"\bwithout a word\b": "silently, without a message",
    r"\bst(ands?|ood|anding) still\b": "is blocked, makes no progress, is stopped",
    r"\b[Tt]hose of them\b": "repeat the noun",
    r"\b[Ww]hat of (it|them|that|those)\b": "the part of NOUN that",
    r"\bof those whose\b": "repeat the noun",
    r"\b(is|are|was|were|be|been) told\b(?! apart)": "receives, is reported, knows",
    r"\b(is|are|was|were|be|been) said\b": "is reported, reads",
    r"\b(is|are|was|were|be|been) (asked|looked at|heard)\b": "is polled, queried, shown, examined",
    r"\b(hears?|heard) (from|of|nothing)\b": "receives a report",
    r"\b(told|tell|tells) apart\b": "distinguish",
    r"\bto be (touched|had)\b": "refusing to attach, available",
    r"\b(far|[Bb]ack|[Ff]orth) (forth|in time)\b": "previous, next snapshot",
    r"\bwatching costs\b": "monitoring overhead",
    r"\bwhat differs by more than\b": "significant differences",
    r"\bidle hooks\b|\bhooks (are |were )?idle\b": "control step, inactive hooks",
    r"\b(say|says|said) so\b": "report, name what is reported",
    r"\banew\b": "again",
    r"(?<!a member )\b(has|have|had) not come\b": "has not called, is missing",
    r"\bwhat(ever)? befell\b": "fault",
    r"\b(the|a) meeting\b": "rendezvous",
    r"\bdid not tell\b|\bdoes not tell\b": "did not report",
    r"\bof ours\b": "of zeromon",
    r"(?<!-)\bprice\b(?! of an hour)": "cost",
    r"\bwhat is in the way\b": "problems, what prevents",
    r"\baccused\b": "named as straggler",
    r"\bnobody (read|asked|heard)\b": "no collector read",
}
"""An expression, and what to write in its place."""


def trees() -> Iterator[tuple[str, ast.Module]]:
    for file in SOURCES:
        yield str(file.relative_to(ROOT)), ast.parse(file.read_text())


def test_no_module_has_a_former_name() -> None:
    found = {str(file.relative_to(ROOT)): MODULES[file.stem] for file in SOURCES if file.stem in MODULES}
    assert found == {}


def test_no_class_or_function_has_a_former_name() -> None:
    found = {
        f"{path}:{node.lineno} {node.name}": NAMES[node.name]
        for path, tree in trees()
        for node in ast.walk(tree)
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) and node.name in NAMES
    }
    assert found == {}


def help_texts() -> Iterator[tuple[str, str]]:
    """``zeromon --help`` and the help of every verb."""
    stack = [("zeromon", build_parser())]
    while stack:
        name, parser = stack.pop()
        yield f"{name} --help", parser.format_help()
        for action in parser._actions:
            if isinstance(getattr(action, "choices", None), dict):
                stack += [(f"{name} {verb}", sub) for verb, sub in action.choices.items()]


def documents() -> Iterator[tuple[str, str]]:
    """Pages for users and contributors. The changelog names former things."""
    for file in sorted((ROOT / "docs").rglob("*.md")):
        yield str(file.relative_to(ROOT)), file.read_text()
    for name in ("README.md", "CONTRIBUTING.md"):
        yield name, (ROOT / name).read_text()


def messages() -> Iterator[tuple[str, str]]:
    """Every text in the code that is no docstring: errors, hints, findings, labels, key bindings."""
    for path, tree in trees():
        docstrings = {
            id(node.value)
            for node in ast.walk(tree)
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        }
        for node in ast.walk(tree):
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and id(node) not in docstrings
                and " " in node.value.strip()
            ):
                yield f"{path}:{node.lineno}", node.value


@cache
def texts(kind: str) -> list[tuple[str, str]]:
    """Where a text is, and the text."""
    if kind == "help":
        return list(help_texts())
    if kind == "metrics":
        return [(spec.name, spec.help) for spec in METRICS]
    if kind == "rules":
        return [(page.code, page.text) for page in all_pages().values()]
    if kind == "docs":
        return list(documents())
    return list(messages())


KINDS = ("help", "metrics", "rules", "docs", "messages")


@pytest.mark.parametrize("kind", KINDS)
def test_no_text_that_a_user_reads_has_a_listed_phrase(kind: str) -> None:
    found = [
        f"{place}: {match.group()!r} -> {better}"
        for place, text in texts(kind)
        for phrase, better in PHRASES.items()
        for match in re.finditer(phrase, " ".join(text.split()))
    ]
    assert found == [], "\n".join(found)


@pytest.mark.parametrize("kind", KINDS)
def test_the_texts_are_found(kind: str) -> None:
    """A kind without texts would pass the test above."""
    assert len(texts(kind)) > 15


def test_errors_are_among_the_messages() -> None:
    assert any("zeromon/base/errors.py" not in place for place, _ in texts("messages"))
    assert errors.ZeromonError.__doc__

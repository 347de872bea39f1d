"""Escapes of a terminal in any field of a run, a configuration or a trace do not reach a terminal."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from builders import changed, full_run
from hostile import EVIL, evil
from prometheus_client.openmetrics.parser import text_string_to_metric_families as openmetrics_families
from prometheus_client.parser import text_string_to_metric_families as prometheus_families

from zeromon.base.units import printable_lines
from zeromon.cli import main
from zeromon.export.prometheus.metrics import Writer
from zeromon.snapshot import RunSnapshot
from zeromon.storage.run_store import Store


@pytest.fixture
def recorded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    known = full_run()
    one = changed(known.ranks[0], pipeline=None)  # whose stages have no other rank there
    run = dataclasses.replace(evil(dataclasses.replace(known, ranks=(one,))), run="evil", ended=True)
    monkeypatch.setenv("ZEROMON_STORE", str(tmp_path / "store"))
    monkeypatch.setenv("ZEROMON_DIR", str(tmp_path / "live"))
    Store().save(run)
    (tmp_path / "ds.json").write_text(json.dumps({EVIL: 1, "zero_optimization": {"stage": EVIL}}))
    events = [
        {"ph": "X", "cat": "kernel", "name": f"ncclDevKernel_AllReduce{EVIL}", "pid": 0, "tid": 7,
         "ts": n * 10, "dur": 5, "args": {"Collective name": EVIL, "Process Group Name": EVIL}}
        for n in range(3)
    ]  # fmt: skip
    (tmp_path / "trace.json").write_text(json.dumps({"traceEvents": events}))
    return tmp_path


@pytest.mark.parametrize(
    "words",
    [
        "report evil", "ledger evil", "compare evil evil", "runs", "doctor", "plan --from evil",
        "plan --from evil --changes",
        "check ds.json", "check ds.json --cluster x", "trace analyze trace.json",
        "report \x1b[2Jx", "plan \x1b[2Jx", "check \x1b[2Jx", "plan 7B --set \x1b[2Jx=1",
    ],
)  # fmt: skip
def test_no_verb_prints_a_control_character(
    words: str, recorded: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recorded)
    try:
        main(words.split(" "))
    except SystemExit:
        pass
    out, err = capfd.readouterr()
    assert "Traceback" not in err and out + err
    assert printable_lines(out + err) == out + err


def test_prometheus_gets_none_either() -> None:
    text = Writer().write((evil(full_run()),), None, openmetrics=False).decode()
    assert printable_lines(text) == text and "x?]0;pwn" in text


FORGED = [
    '"} 1\nforged{a="b',
    "\\",
    '\\"',
    "\n# TYPE forged gauge\nforged 1\n",
    "a\\nb\u2028c\x00,=}{#",
    'x"\n\\' * 2_500,
]


@pytest.mark.parametrize("openmetrics", [False, True])
@pytest.mark.parametrize("text", FORGED, ids=lambda text: repr(text[:20]))
def test_a_label_value_forges_no_sample(text: str, *, openmetrics: bool) -> None:
    """Prometheus's own parsers read as many samples of the same metrics as without it."""
    parse = openmetrics_families if openmetrics else prometheus_families

    def samples(run: RunSnapshot) -> list[str]:
        written = Writer().write((run,), None, openmetrics=openmetrics).decode()
        found = [sample for family in parse(written) for sample in family.samples]
        assert all(set(sample.labels) for sample in found)
        return [sample.name for sample in found]

    known = full_run()
    assert samples(evil(known, text=text)) == samples(evil(known, text="x"))

"""`zeromon report --ledger`: the table of a job, in seconds, money and kWh."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from builders import rank, received, run
from command_line import zeromon_here

from zeromon.snapshot.host import Energy
from zeromon.snapshot.ledger import Cause, LedgerRow
from zeromon.storage.run_store import Store

HOUR = 3600.0


def record(home: Path, name: str, facts: dict[str, Any] | None = None, **of_run: object) -> None:
    """A run of two ranks of an hour each, three quarters of it computing."""
    rows = (
        LedgerRow(cause=Cause.COMPUTE, seconds=0.75 * HOUR),
        LedgerRow(cause=Cause.DATA, seconds=0.25 * HOUR),
    )
    ranks = [
        rank(number, ledger_rows=rows, alive=False, ended="finished", **(facts or {}))
        for number in range(2)
    ]
    Store(home / "store").save(run(*ranks, run=name, ended=True, **of_run))


def test_a_cause_has_its_seconds_its_price_and_its_energy(tmp_path: Path) -> None:
    """2 ranks, 2 EUR an hour each; 1 kW for the node, which is 500 W a rank."""
    used = Energy(seconds=HOUR, device_joules=3e6, host_joules=0.6e6)
    record(tmp_path, "one", energy=used)
    done = zeromon_here(tmp_path, "report", "--ledger", "--price", "2")
    assert (done.returncode, done.stderr) == (0, "")
    lines = [line.split() for line in done.stdout.splitlines() if "%" in line or "cause" in line]
    header = next(words for words in lines if words[0] == "cause")
    assert " ".join(header).endswith("share money kWh at mean power")
    compute = next(words for words in lines if words[0] == "compute")
    assert compute[-5:-1] == ["75.0", "%", "3", "0.75"]
    content = json.loads(zeromon_here(tmp_path, "report", "--ledger", "--json").stdout)
    assert content["mean_watts"] == 1000
    assert content["goodput_ratio"] == 0.75
    assert [row["cause"] for row in content["rows"]] == ["compute", "data"]


def test_no_counter_of_energy_makes_no_column(tmp_path: Path) -> None:
    record(tmp_path, "one")
    done = zeromon_here(tmp_path, "report", "--ledger", "one")
    assert "kWh" not in done.stdout
    assert "goodput 75.0 % of 2 h" in done.stdout


def test_a_price_that_is_none_is_refused(tmp_path: Path) -> None:
    done = zeromon_here(tmp_path, "report", "--ledger", "--price", "-1")
    assert done.returncode == 2
    assert "must be above 0" in done.stderr


def test_json_has_the_tokens_of_a_useful_second(tmp_path: Path) -> None:
    """Each of two ranks got 5,400 tokens in 2,700 useful seconds; None where no batch is known."""
    record(tmp_path, "one", facts={"batches": received(18, length=30), "strategy": "ddp"})
    content = json.loads(zeromon_here(tmp_path, "report", "--ledger", "--json").stdout)
    assert (content["unit"], content["units_per_useful_second"]) == ("tokens", 2.0)
    record(tmp_path, "two")
    content = json.loads(zeromon_here(tmp_path, "report", "--ledger", "--json", "two").stdout)
    assert content["units_per_useful_second"] is None


def test_a_report_folds_the_set_up_and_what_is_small(tmp_path: Path) -> None:
    """The rows still sum to all seconds; the ledger alone has each row."""
    parts = {"imports": 90.0, "launch": 10.0}
    rows = (
        LedgerRow(cause=Cause.COMPUTE, seconds=890.0),
        *(LedgerRow(cause=Cause.SET_UP, of=name, seconds=s) for name, s in parts.items()),
        LedgerRow(cause=Cause.DATA, seconds=6.0),
        LedgerRow(cause=Cause.OTHER, seconds=4.0),
    )
    ended = rank(ledger_rows=rows, alive=False, ended="finished")
    Store(tmp_path / "store").save(run(ended, run="one", ended=True))

    def seconds_of(*words: str) -> dict[str, str]:
        lines = zeromon_here(tmp_path, "report", "one", *words).stdout.partition("  cause")[2]
        table = [line.split("  ") for line in lines.partition("\n\n")[0].splitlines()[1:]]
        return {cells[1]: next(filter(None, cells[2:])).strip() for cells in table}

    assert seconds_of("--full") == {
        "compute": "14 min 50 s", "set-up": "100.00 s", "2 causes below 1 %": "10.00 s",
        "sum": "16 min 40 s",
    }  # fmt: skip
    assert {"set-up: imports", "set-up: launch", "data", "other"} <= set(seconds_of("--ledger"))

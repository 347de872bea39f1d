"""The energy of a node: RAPL's counters in a folder as the kernel makes it, and what is added up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from builders import changed, rank, received, run
from hypothesis import given, strategies as st

from zeromon.probes.energy import EnergyMeter, Rapl
from zeromon.readout.ledger import energy_text, joules_per_unit, mean_watts
from zeromon.snapshot.host import Energy
from zeromon.snapshot.ledger import Cause, LedgerRow

RANGE = 262.143


def zone(root: Path, folder: str, name: str, joules: float) -> None:
    (root / folder).mkdir(exist_ok=True)
    (root / folder / "name").write_text(f"{name}\n")
    (root / folder / "energy_uj").write_text(f"{joules * 1e6:.0f}\n")
    (root / folder / "max_energy_range_uj").write_text(f"{RANGE * 1e6:.0f}\n")


def test_packages_and_dram_count_and_cores_within_a_package_do_not(tmp_path: Path) -> None:
    zone(tmp_path, "intel-rapl:0", "package-0", 10)
    zone(tmp_path, "intel-rapl:0:0", "core", 7)
    zone(tmp_path, "intel-rapl:0:1", "dram", 2)
    zone(tmp_path, "intel-rapl:1", "package-1", 20)
    zone(tmp_path, "intel-rapl:2", "psys", 99)
    (tmp_path / "intel-rapl").mkdir()
    meter, rapl = EnergyMeter(), Rapl(tmp_path)
    assert meter.add(1, {}, rapl.read()).host_joules == 0
    zone(tmp_path, "intel-rapl:0", "package-0", 13)
    zone(tmp_path, "intel-rapl:0:0", "core", 9)
    zone(tmp_path, "intel-rapl:0:1", "dram", 3)
    zone(tmp_path, "intel-rapl:1", "package-1", 25)
    used = meter.add(2_000_000_001, {}, rapl.read())
    assert (used.host_joules, used.seconds, used.device_joules) == (pytest.approx(9), 2, None)


@given(st.lists(st.floats(0, RANGE * 0.9), max_size=20), st.floats(0, RANGE))
def test_a_counter_that_begins_anew_loses_nothing(steps: list[float], start: float) -> None:
    meter, truth, last = EnergyMeter(), 0.0, 0.0
    for now, step in enumerate([0.0, *steps], 1):
        truth += step
        reading = (start + truth) % RANGE
        last = meter.add(now, {}, {"package": (reading, RANGE)}).host_joules or 0.0
    assert last == pytest.approx(truth, abs=1e-6)


def test_ranks_of_one_device_count_it_once_and_a_new_driver_takes_nothing_away() -> None:
    meter = EnergyMeter()
    meter.add(1, {"GPU-a": 1000.0}, {})
    assert meter.add(2, {"GPU-a": 1500.0}, {}).device_joules == 500
    assert meter.add(3, {"GPU-a": 3.0}, {}).device_joules == 503  # the driver was loaded again
    assert meter.add(4, {}, {}).device_joules == 503


def test_what_cannot_be_read_is_unknown_with_its_reason(tmp_path: Path) -> None:
    absent = Rapl(tmp_path)
    used = EnergyMeter().add(1, {}, absent.read(), absent.note)
    assert (used.host_joules, used.device_joules) == (None, None)
    assert "virtual machine" in used.host_note
    zone(tmp_path, "intel-rapl:0", "package-0", 1)
    (tmp_path / "intel-rapl:0" / "energy_uj").write_text("")
    broken = Rapl(tmp_path)
    assert broken.read() == {}
    assert broken.note == "RAPL counters cannot be read"


def test_the_text_names_what_is_missing() -> None:
    one = run(rank(0), node="n1")
    used = Energy(seconds=100, device_joules=72_000.0, host_joules=None, host_note="no counters")
    known = replace(one, energy=used)
    assert mean_watts(known) == 720
    text = energy_text(known)
    assert text.startswith("72 kJ by devices of n1 in 100.00 s, mean 720 W, J/token n/a: batch size")
    assert text.endswith("; CPU n/a: no counters")
    assert energy_text(one) == ""
    nothing = energy_text(replace(one, energy=replace(used, device_joules=None)))
    assert nothing == "n/a: no device energy counter; CPU n/a: no counters"
    assert mean_watts(replace(one, energy=replace(used, device_joules=None))) is None


def test_a_token_has_its_joules() -> None:
    """Two ranks that live for 100 s at 720 W, and get 36,000 tokens together; one may get none."""
    lived = (
        LedgerRow(cause=Cause.COMPUTE, seconds=60), LedgerRow(cause=Cause.CHECKPOINT, seconds=40),
    )  # fmt: skip
    facts = {"ledger_rows": lived, "strategy": "ddp", "world_size": 2}
    ranks = [rank(n, batches=received(60, length=30), **facts) for n in range(2)]
    used = Energy(seconds=50, device_joules=36_000.0, host_joules=0.0)
    one = run(*ranks, energy=used)
    assert joules_per_unit(one) == (2.0, "token")
    assert energy_text(one).endswith("mean 720 W, 2 J/token")
    images = [changed(each, batches=received(60)) for each in ranks]
    assert joules_per_unit(replace(one, ranks=tuple(images))) == (60.0, "sample")
    untold = replace(one, ranks=(ranks[0], changed(ranks[1], batches=None)))
    assert joules_per_unit(untold) == "batch size unknown for at least one rank"

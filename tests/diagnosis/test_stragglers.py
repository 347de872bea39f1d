"""Stragglers by arrival: who is called late, who is not, since when, and why."""

from __future__ import annotations

import itertools
import os
import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from builders import MS, arrival, arrived, changed, rank, run, short_of_cpus, summary

from zeromon.diagnosis.arrivals import ArrivalSkew, MatchedCollective, StepSkew
from zeromon.diagnosis.engine import advise
from zeromon.diagnosis.stragglers import (
    find_stragglers,
    hardware_cause,
    lack_of_cpus,
    longer_phases,
    since_step,
)
from zeromon.fold.fold import fold_records
from zeromon.fold.state import MAX_ARRIVALS, RankState
from zeromon.probes.cpu_pressure import CpuUsers, PressureReader, usable_cpu_count
from zeromon.readout.verdict import judge_run
from zeromon.ring.codes import Flag, Kind, Op, Phase
from zeromon.ring.events import pack_call_word
from zeromon.snapshot import RankSnapshot, StepSummary
from zeromon.snapshot.host import Device, Pressure
from zeromon.snapshot.levels import CPU_WAIT, UNSTEADY_SECONDS, WINDOW_STEPS

STEP_MS = 100


def steps(
    late: dict[int, float], count: int = 40, ranks: int = 4, noise: float = 0.3, begins: int = 10
) -> ArrivalSkew:
    """*count* steps of three collectives; *late*: rank -> ms that it comes later from *begins* on."""
    chooser = random.Random(2)
    skew = ArrivalSkew()
    for step in range(1, count + 1):
        for call in range(3):
            at = step * STEP_MS * MS + call * 10 * MS
            for number in range(ranks):
                behind = late.get(number, 0.0) if step >= begins and call == 0 else 0.0
                jitter = chooser.uniform(0, noise)
                called = round(at + (behind + jitter) * MS)
                arrived(skew, number, ranks, arrival(step * 3 + call, called, step))
    return skew


def ranks(count: int = 4, slow: int = -1, longer: int = 18) -> list[RankSnapshot]:
    """The forward of rank *slow* is longer by so many ms."""
    return [
        rank(n, median_seconds=STEP_MS / 1e3, recent=phases(40 + longer * (n == slow), 0))
        for n in range(count)
    ]


def test_a_lateness_from_the_first_steps_on_has_to_last() -> None:
    """The first steps of identical ranks differ, by what each of them allocates and compiles."""
    early, later = {"begins": 4, "count": 50}, {"begins": 10, "count": 50}
    assert not find_stragglers(steps({2: 18.0}, **early), ranks(slow=2))
    assert find_stragglers(steps({2: 18.0}, **later), ranks(slow=2))
    assert find_stragglers(steps({2: 18.0}, begins=4, count=60), ranks(slow=2))


def test_a_lasting_lateness_of_fast_steps_is_not_forgotten() -> None:
    """Five seconds are more steps than are kept."""
    skew = steps({2: 18.0}, count=700)
    for step in skew.steps.values():
        step.last_ns //= 25  # steps of 4 ms
    assert find_stragglers(skew, ranks(slow=2))


def test_a_rank_that_comes_late_is_named_with_how_late_and_since_when() -> None:
    skew = steps({2: 18.0})
    (found,) = find_stragglers(skew, ranks(slow=2))
    assert (found.phases, found.longer_seconds) == (("forward",), pytest.approx(0.018))
    assert (found.rank, found.since_step) == (2, 10)
    assert found.late_seconds == pytest.approx(0.018, rel=0.1)
    assert found.share == pytest.approx(0.18, rel=0.1)
    assert skew.wait_seconds(0) == pytest.approx(0.018, rel=0.2)
    assert skew.wait_seconds(2) == pytest.approx(0.0005, abs=0.0005)
    assert skew.late_seconds(2) == pytest.approx(0.018, rel=0.1)


def test_nobody_waits_for_a_late_rank_as_long_as_the_others_compute() -> None:
    """Two buckets in flight: both come 50 ms late, and the others are blocked in the last 12 ms."""
    skew = ArrivalSkew()
    for number in range(3):
        for call, at in enumerate((0, 38)):
            called = at + (50 if number == 2 else 0)
            blocked_from = (called if number == 2 else 76) * MS
            one = arrival(call + 1, called * MS, 1, 100 * MS, waits_from_ns=blocked_from)
            arrived(skew, number, 3, one)
    assert skew.late_seconds(2) == pytest.approx(0.012)
    assert skew.late_seconds(0) is not None and not skew.late_seconds(0)
    assert skew.wait_seconds(0) == skew.wait_seconds(1) == pytest.approx(0.012)
    assert skew.wait_seconds(2) == 0


@pytest.mark.parametrize("noise", [0.0, 0.5, 5.0])
def test_nobody_is_accused_without_reason(noise: float) -> None:
    """Jitter of any size: somebody is always last, and never the same one."""
    assert all(find_stragglers(steps({}, noise=noise), ranks(slow=n)) == () for n in range(4))


@pytest.mark.parametrize(("late", "named"), [(1.0, 0), (9.0, 0), (11.0, 1)])
def test_a_lateness_below_a_tenth_of_a_step_is_none(late: float, named: int) -> None:
    assert len(find_stragglers(steps({1: late}, noise=0.0), ranks(slow=1))) == named


@pytest.mark.parametrize(("longer", "named"), [(0, 0), (4, 0), (8, 0), (10, 1), (18, 1)])
def test_a_reason_covers_half_of_the_delay(longer: int, named: int) -> None:
    """Rank 1 comes 18 ms late; where it spends less than half of that, its lateness is noise."""
    assert len(find_stragglers(steps({1: 18.0}), ranks(slow=1, longer=longer))) == named
    assert find_stragglers(steps({1: 18.0}), ranks(slow=2, longer=longer)) == ()


def test_a_reason_may_be_several_phases() -> None:
    """A slow device: 6 ms in each of three phases, of a delay of 18 ms."""
    slow = summary(1, phase_ns=(5 * MS, 46 * MS, 56 * MS, 16 * MS, 5 * MS, 0), phase_exposed_ns=(0,) * 6)
    known = ranks()
    known[1] = changed(known[1], recent=(slow,) * 20)
    (found,) = find_stragglers(steps({1: 18.0}), known)
    assert len(found.phases) == 2 and found.longer_seconds == pytest.approx(0.012)


@pytest.mark.parametrize(("count", "named"), [(60, 0), (200, 0), (400, 1)])
def test_a_lack_of_cpus_makes_a_straggler_only_where_it_stays(count: int, named: int) -> None:
    """Steps of 100 ms: the scheduler moves such a lack between identical ranks within seconds."""
    known = ranks(slow=1)
    known = [
        changed(r, pressure=pressed(0, 0.3 if r.rank == 1 else 0.0).machine.pressure) for r in known
    ]
    found = find_stragglers(steps({1: 18.0}, count), known)
    assert (len(found) == named and count * STEP_MS / 1e3 < UNSTEADY_SECONDS) or found[0].cause


@pytest.mark.parametrize(("lacks", "named"), [(0.1, 1), (0.16, 1), (0.3, 0)])
def test_phases_are_no_reason_where_ranks_lack_cpus_for_longer(lacks: float, named: int) -> None:
    """All ranks lack CPUs alike: 18 ms more in a phase of a step of 100 ms may be that."""
    pressure = Pressure(
        cpu_wait_ratio=lacks, minute_cpu_wait_ratio=lacks, held_cpu_wait_ratio=lacks,
        major_faults_per_second=0,
    )  # fmt: skip
    known = [changed(r, pressure=pressure) for r in ranks(slow=1)]
    assert len(find_stragglers(steps({1: 18.0}, 60), known)) == named
    several = summary(
        1, phase_ns=(5 * MS, 49 * MS, 59 * MS, 19 * MS, 5 * MS, 0), phase_exposed_ns=(0,) * 6
    )
    known[1] = changed(known[1], recent=(several,) * 20)
    assert len(find_stragglers(steps({1: 18.0}, 60), known)) == (lacks < CPU_WAIT.warning)


def test_late_in_most_of_the_last_seconds() -> None:
    """Twenty short steps are over in a moment: rank 1 is late in the last 24 of 200 steps of 10 ms."""
    skew = ArrivalSkew()
    for step in range(1, 201):
        for number in range(2):
            late = 5 * MS if number == 1 and step > 176 else 0
            arrived(skew, number, 2, arrival(step, step * 10 * MS + late, step))
    assert find_stragglers(skew, ranks(2, slow=1)) == ()


def test_two_forwards_of_noise_are_no_begin() -> None:
    """Fifty drawn series: rank 1 is late by 50 ms from step 61 on, all ranks by up to 40 ms in any."""
    wrong = []
    for seed in range(50):
        chooser = random.Random(seed)
        skew = ArrivalSkew()
        for step in range(1, 130):
            late = {n: chooser.uniform(0, 40) * (chooser.random() < 0.5) for n in range(2)}
            late[1] += 50 if step >= 61 and chooser.random() > 0.05 else 0
            for number in range(2):
                at = round((step * 200 + late[number]) * MS)
                arrived(skew, number, 2, arrival(step, at, step))
        (found,) = find_stragglers(skew, ranks(2, slow=1, longer=50))
        if not 59 <= found.since_step <= 65:
            wrong.append(found.since_step)
    assert len(wrong) <= 2, wrong


def test_a_pause_before_the_lateness_is_not_its_begin() -> None:
    """One step that is late by ten times as much, long before."""
    lengths = [0] * 20 + [500] + [0] * 20 + [50] * 30
    found = [(number, StepSkew()) for number in range(1, len(lengths) + 1)]
    length_of = {id(s): length for (_, s), length in zip(found, lengths, strict=True)}
    assert since_step(found, lambda s: length_of[id(s)], 50) == 42


def test_since_when_is_not_forgotten_with_the_steps() -> None:
    """512 steps are kept; a rank that is late for longer has been so since the step first told."""
    (first,) = find_stragglers(steps({1: 18.0}, 60), ranks(slow=1))
    (later,) = find_stragglers(steps({1: 18.0}, 700), ranks(slow=1), earlier=(first,))
    assert first.since_step == later.since_step == 10
    # The oldest steps that are kept may be some in which it was less late
    skew = steps({1: 18.0}, 700)
    for step in list(skew.steps)[:2]:
        skew.steps[step] = StepSkew(last_ns=skew.steps[step].last_ns)
    (again,) = find_stragglers(skew, ranks(slow=1))
    (remembered,) = find_stragglers(skew, ranks(slow=1), earlier=(first,))
    assert again.since_step > min(skew.steps) and remembered.since_step == 10


def test_delays_that_overlap_count_once() -> None:
    """Two buckets in flight at once, as under DDP: both wait for the same sleep of rank 1."""
    skew = ArrivalSkew()
    for step in range(1, 41):
        at = step * 160
        for call, ready in enumerate((at, at + 15)):
            for number, behind in ((0, 0), (1, 100)):
                called = (ready + behind) * MS
                arrived(skew, number, 2, arrival(step * 2 + call, called, step))
    assert skew.late_seconds(1) == skew.wait_seconds(0) == pytest.approx(0.115)
    assert (skew.late_seconds(0), skew.wait_seconds(1)) == (0, 0)
    known = ranks(2, slow=1, longer=100)
    (found,) = find_stragglers(skew, [changed(r, median_seconds=0.160) for r in known])
    assert found.late_seconds == pytest.approx(0.115)
    assert found.share == pytest.approx(0.115 / 0.160)
    (found,) = find_stragglers(skew, known)
    assert (found.late_seconds, found.share) == (0.1, 1.0)


def test_delays_of_one_node_that_overlap_count_once() -> None:
    """Ranks 2 and 3 of node b are each last in one of two collectives that are in flight at once."""
    skew = ArrivalSkew()
    skew.joined = True
    for step in range(1, 41):
        for call in (0, 1):
            at = (step * 160 + 10 * call) * MS
            sequence = step * 2 + call
            arrived(skew, 0, 1, arrival(sequence, at, step), 3)
            late = 50 * MS
            skew.record_match(MatchedCollective("g", sequence, at + late, 2 + call, 0, late, MS))
    known = [rank(n, median_seconds=0.160) for n in (0, 1)]
    (found,) = find_stragglers(skew, known, lambda one: "b" if one > 1 else "a")
    assert (found.node, found.late_seconds) == ("b", pytest.approx(0.060))


def test_two_that_are_late_alike_are_not_told_apart() -> None:
    """Nobody waits for one of them alone."""
    assert find_stragglers(steps({1: 18.0, 2: 18.0}), ranks(slow=1)) == ()


def test_recovery_is_noticed() -> None:
    """Some steps after it was well again nothing is said."""
    skew = steps({3: 18.0})
    assert find_stragglers(skew, ranks(slow=3))
    for step in range(41, 101):
        for number in range(4):
            arrived(skew, number, 4, arrival(10_000 + step, step * 100 * MS + number % 2, step))
    assert find_stragglers(skew, ranks(slow=3)) == ()


def test_too_little_to_say() -> None:
    """The first steps; a single rank; a group of which one member is here."""
    assert find_stragglers(steps({1: 18.0}, count=15), ranks(slow=1)) == ()
    assert find_stragglers(steps({1: 18.0}), ranks(1, slow=0)) == ()
    alone = ArrivalSkew()
    arrived(alone, 0, 1, arrival(1, 1, 1))
    assert alone.steps == {} and alone.wait_seconds(0) is None


def test_of_a_ring_that_is_read_at_once_the_newest_calls_are_matched() -> None:
    """As after a restart of the collector: 12,000 calls of one rank, then those of the other."""
    skew, states = ArrivalSkew(), [RankState(rank=number) for number in range(2)]
    word = pack_call_word(Kind.DONE, Op.ALL_REDUCE, Phase.BACKWARD, Flag.SPAN_KNOWN, 1, 0)
    for number, state in enumerate(states):
        late = number * MS
        calls = [(n, (10 * n + 5) * MS, word, 4, 10 * n * MS + late, 0, n, n) for n in range(1, 12_001)]
        fold_records(state, calls)
        skew.record_arrivals(number, {1: ("g", 2, 2)}, state.arrivals)
    assert len(states[0].arrivals) == MAX_ARRIVALS
    (row,) = states[0].traffic.values()
    assert skew.late_seconds(1) == 0  # nobody was blocked
    assert row.now.transfer_ns == MAX_ARRIVALS * 4 * MS


def test_what_never_completes_is_forgotten() -> None:
    """A rank that died: what the others called is not kept for ever."""
    skew = ArrivalSkew()
    for sequence in range(20_000):
        arrived(skew, 0, 2, arrival(sequence, sequence, 1))
    assert sum(map(len, skew._pending.values())) == skew._kept == 8192


def test_waits_that_no_mean_reads_are_forgotten() -> None:
    """Of a long run those of 40 steps are kept, and the mean is that of a short one."""
    short, long = steps({2: 18.0}, 60, noise=0), steps({2: 18.0}, 400, noise=0)
    assert sum(bool(skew.wait) for skew in long.steps.values()) == 2 * WINDOW_STEPS
    assert sum(bool(skew.late) for skew in long.steps.values()) == 400
    assert long.wait_seconds(0) == short.wait_seconds(0) > 0.017


def test_a_collective_is_split_into_transfer_and_wait() -> None:
    """Rank 0 comes 8 ms before rank 1; both leave 2 ms after that."""
    early, late = arrival(1, 10 * MS, 1, 20 * MS), arrival(1, 18 * MS, 1, 20 * MS)
    skew = ArrivalSkew()
    arrived(skew, 0, 2, early)
    arrived(skew, 1, 2, late)
    for one, wait in ((early, 8 * MS), (late, 0)):
        now = one.row.at(0)
        assert (now.wait_ns, now.transfer_ns, now.matched_bytes) == (wait, 2 * MS, 1000)


def test_an_end_that_is_seen_late_is_no_wait() -> None:
    """Rank 1 looks 30 ms after the end: the transfer is the other's 2 ms, and nobody has waited."""
    first, second = arrival(1, 10 * MS, 1, 12 * MS), arrival(1, 10 * MS, 1, 42 * MS)
    skew = ArrivalSkew()
    arrived(skew, 0, 2, first)
    arrived(skew, 1, 2, second)
    assert [one.row.at(0).wait_ns for one in (first, second)] == [0, 0]
    assert second.row.at(0).transfer_ns == 2 * MS


def phases(forward: int, exposed: int, data: int = 5) -> tuple[StepSummary, ...]:
    one = summary(
        1,
        phase_ns=(5 * MS, forward * MS, 50 * MS, 10 * MS, data * MS, 0),
        phase_exposed_ns=(0, exposed * MS, 0, 0, 0, 0),
    )
    return (one,) * 20


def test_the_phase_that_makes_it_late_leaves_waiting_out() -> None:
    """The others' forward is as long, but they wait in it."""
    late = rank(1, recent=phases(40, 0))
    others = [rank(n, recent=phases(40, 12)) for n in (0, 2)]
    assert longer_phases(late, others, 0.01) == (("forward",), pytest.approx(0.012))
    data = rank(1, recent=phases(28, 0, data=17))
    assert longer_phases(data, others, 0.01) == (("data_wait",), pytest.approx(0.012))
    assert longer_phases(data, others, 0.02) == longer_phases(late, [], 0.01) == ((), 0.0)


def test_the_finding_says_it_in_words() -> None:
    found = find_stragglers(steps({2: 18.0}), ranks(slow=2))
    told = [f for f in advise(run(*ranks(), stragglers=found)) if f.rule == "straggler"]
    assert [f.rank for f in told] == [2]
    assert told[0].text.startswith("late by 18.0 ms per step (forward) since step 10; the others wait ")


def pressed(number: int, waits: float = 0.01, faults: float = 0.0, **facts: Any) -> RankSnapshot:
    found = Pressure(cpu_wait_ratio=waits, major_faults_per_second=faults)
    return rank(number, pressure=found, **facts)


def test_the_host_or_the_device_of_a_late_rank_may_explain_it() -> None:
    others = [pressed(0), pressed(2)]
    assert hardware_cause(pressed(1), others) == lack_of_cpus(pressed(1), others, 0.05) == ""
    assert lack_of_cpus(pressed(1, waits=0.07), others, 0.05).startswith("its main thread had no CPU")
    assert lack_of_cpus(pressed(1, waits=0.04), others, 0.05) == ""  # not enough for a tenth of a step
    assert hardware_cause(pressed(1, faults=500), others) == "500 of its pages a second come from disk"
    assert hardware_cause(pressed(1, faults=500), [pressed(0, faults=100)]) == ""
    hot = Device(throttle_reasons=("thermal",))
    assert "throttled (thermal)" in hardware_cause(pressed(1, machine_device=hot), others)
    assert hardware_cause(pressed(1, machine_device=hot), [pressed(0, machine_device=hot)]) == ""
    assert hardware_cause(rank(1), others) == lack_of_cpus(rank(1), others, 0.05) == ""


def read_pressure(folder: Path, waited_s: Sequence[float], steps: Sequence[int]) -> list[Any]:
    """One reading a second of a process that has waited so long for a CPU, and taken so many steps."""
    (folder / "7").mkdir()
    reader, found = PressureReader(7, folder), []
    for second, (waited, taken) in enumerate(zip(waited_s, steps, strict=True)):
        # a name with spaces and parentheses does not shift the fields
        fields = " ".join(["S", *"123456789"[:8], str(second * 4), "0"])
        (folder / "7" / "stat").write_text(f"7 (a) b) c) {fields}\n")
        (folder / "7" / "schedstat").write_text(f"5 {round(waited * 1e9)} 9\n")
        found.append(reader.read(second * 10**9, taken, (second - 10) * 10**9))
    return found


def test_pressure_is_read_from_proc(tmp_path: Path) -> None:
    found = read_pressure(tmp_path, [s / 4 for s in range(30)], [*range(30)])
    assert (found[0], found[4].minute_cpu_wait_ratio) == (None, 0.0)  # too few seconds of steps
    assert found[-1].cpu_wait_ratio == found[-1].minute_cpu_wait_ratio == pytest.approx(0.25)
    assert found[-1].major_faults_per_second == pytest.approx(4)
    assert PressureReader(8, tmp_path).read(1, 1, 1) is None


def test_imports_before_the_first_step_are_no_pressure(tmp_path: Path) -> None:
    """Starved for twenty seconds of imports, then never."""
    waited = [min(s, 20.0) for s in range(60)]
    found = read_pressure(tmp_path, waited, [max(0, 10 * (s - 21)) for s in range(60)])
    assert [f for f in found[:22] if f] == []
    assert {(f.cpu_wait_ratio, f.minute_cpu_wait_ratio) for f in found[23:]} == {(0.0, 0.0)}


def test_a_share_that_wobbles_around_a_level_is_held(tmp_path: Path) -> None:
    """23 and 27 % of the time in turns of seven seconds for four minutes: one level, not thirty."""
    waited = [0.0]
    for second in range(240):
        waited.append(waited[-1] + (0.27 if second // 7 % 2 else 0.23))
    found = [f for f in read_pressure(tmp_path, waited, [*range(241)]) if f]
    over = [f.held_cpu_wait_ratio >= CPU_WAIT.critical for f in found]
    assert sum(a is not b for a, b in itertools.pairwise(over)) <= 1
    swings = [f.minute_cpu_wait_ratio >= CPU_WAIT.critical for f in found]
    assert sum(a is not b for a, b in itertools.pairwise(swings)) > 3


def test_the_wait_of_all_steps_leaves_out_start_up_and_pauses(tmp_path: Path) -> None:
    """Half of the time without a CPU in the steps; all of it before, and none while no step ends."""
    waited, taken = [0.0], [0]
    for second in range(1, 120):
        started, paused = second >= 20, 60 <= second < 80
        taken.append(taken[-1] + (10 if started and not paused else 0))
        waited.append(waited[-1] + (0.0 if paused else 0.5 if started else 1.0))
    found = read_pressure(tmp_path, waited, taken)
    assert found[-1].steps_cpu_wait_ratio == pytest.approx(0.5)


def test_the_processes_that_take_the_cpus_are_named(tmp_path: Path) -> None:
    """Two that compute, one of which a rank has started, and one that sleeps."""
    users = CpuUsers(tmp_path)
    for second in (0, 10):
        for pid, parent, cpus, words in (
            (11, 1, 0.9, ("/usr/bin/python", "-u", "/home/me/busy.py", "4")),
            (12, 7, 0.5, ("pt_data_worker",)),
            (13, 1, 0.0, ("sleep", "9")),
            (
                14,
                1,
                0.3,
                ("python3", "-c", "import sys\nsys.path[:0] = ['/x/agents']\n\x1b[0m" + "f()\n" * 99),
            ),
            (15, 1, 0.2, ("/home/me/my tool.sh\n", "-c", "site.yaml")),
        ):
            (tmp_path / str(pid)).mkdir(exist_ok=True)
            ticks = round(second * cpus * os.sysconf("SC_CLK_TCK"))
            fields = f"S {parent} " + "0 " * 9 + f"{ticks} 0 0"
            (tmp_path / str(pid) / "stat").write_text(f"{pid} (a b) {fields}\n")
            (tmp_path / str(pid) / "cmdline").write_text("\0".join(words) + "\0")
        found = users.read((100 + second) * 10**9)
    told = [(u.pid, u.name, round(u.cpus, 1), u.parent) for u in found]
    assert told == [
        (11, "python busy.py", 0.9, 1), (12, "pt_data_worker", 0.5, 7),
        (14, "python3 -c import sys sys.path[:0] = ['/x/agents'] ?[0mf() f", 0.3, 1),
        (15, "my tool.sh -c site.yaml", 0.2, 1),
    ]  # fmt: skip
    short = changed(rank(0, watched_steps=40), pid=7, pressure=short_of_cpus(0.3))
    (told_so,) = (f for f in advise(run(short, cpu_users=found)) if f.code == "ZM605")
    assert (
        "python busy.py (pid 11) uses 90.0 % of a CPU; pt_data_worker (pid 12, started by rank 0)"
        in (told_so.text)
    )


@pytest.mark.parametrize(
    ("groups", "files", "cpus"),
    [
        ("0::/job\n", {"job/cpu.max": "150000 100000\n"}, 1.5),
        ("3:cpu,cpuacct:/job\n", {"cpu/job/cpu.cfs_quota_us": "50000\n",
                                 "cpu/job/cpu.cfs_period_us": "100000\n"}, 0.5),
        ("0::/job\n", {"job/cpu.max": "max 100000\n"}, None),
        ("3:cpu:/job\n", {"cpu/job/cpu.cfs_quota_us": "-1\n",
                         "cpu/job/cpu.cfs_period_us": "100000\n"}, None),
        ("0::/job\n", {"job/cpu.max": "\n"}, None),
    ],
)  # fmt: skip
def test_a_quota_of_cpus_is_known(
    tmp_path: Path, groups: str, files: dict[str, str], cpus: float | None
) -> None:
    mine = os.getpid()
    (tmp_path / str(mine)).mkdir()
    (tmp_path / str(mine) / "cgroup").write_text(groups)
    for name, text in files.items():
        file = tmp_path / "cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        (file.parent / "cgroup.procs").touch()
        file.write_text(text)
    own = len(os.sched_getaffinity(0))
    assert usable_cpu_count(mine, tmp_path, tmp_path / "cgroup") == min(own, cpus or own)


@pytest.mark.parametrize("span_known", [True, False])
def test_a_transfer_that_is_only_a_bound_gives_no_bandwidth(span_known: bool) -> None:
    """On a device, where the last rank may have begun at any moment of its call."""
    skew, rows = ArrivalSkew(), []
    for number in range(2):
        one = arrival(1, number * MS, 1, 10 * MS, span_known=span_known or not number)
        one.on_device, one.on_host = True, False
        arrived(skew, number, 2, one)
        rows.append(one.row.at_device(0))
    assert all(row.transfer_ns == 9 * MS for row in rows)
    assert [row.matched_bytes for row in rows] == [1000 * span_known] * 2
    assert [row.matched_ns for row in rows] == [9 * MS * span_known] * 2


def test_on_a_host_one_known_end_is_enough() -> None:
    """The last rank found the others there, and its collective over when it waited at 30 ms."""
    skew, rows = ArrivalSkew(), []
    for number, (start, end, known) in enumerate([(0, 10, True), (4, 30, False)]):
        one = arrival(1, start * MS, 1, end * MS, span_known=known)
        arrived(skew, number, 2, one)
        rows.append(one.row.at(0))
    assert [(row.matched_bytes, row.matched_ns) for row in rows] == [(1000, 6 * MS)] * 2


@pytest.mark.parametrize(
    ("waits", "says"),
    [
        pytest.param((0.02, 0.016), "by turns, 18.0 % of a step", id="each waits"),
        pytest.param((0.04, 0.0), "", id="one is always the last"),
        pytest.param((0.008, 0.008), "", id="below a tenth of a step"),
    ],
)
def test_ranks_that_wait_by_turns_have_uneven_work(waits: tuple[float, float], says: str) -> None:
    """The samples of a step are 512 and 2,048 by turns; nobody is late in most steps."""
    steps = tuple(summary(n, samples=512 if n % 2 else 2048) for n in range(1, 31))
    facts: dict[str, Any] = {"recent": steps, "watched_steps": 30, "mean_seconds": 0.1}
    made = run(*(changed(rank(n), wait_seconds=wait, **facts) for n, wait in enumerate(waits)))
    findings = [finding for finding in advise(made) if finding.rule == "uneven_work"]
    assert bool(findings) == bool(says)
    for finding in findings:
        assert says in finding.text and (finding.rank, finding.severity) == (-1, "warning")
        assert finding.text.endswith("rank 0 has 512 to 2,048 samples per step")
        assert judge_run(replace(made, findings=(finding,))).finding == finding


@pytest.mark.parametrize(("device", "count"), [("cpu", 0), ("cuda:0", 1)])
def test_ranks_that_share_cpus_wait_by_turns_with_even_batches(device: str, count: int) -> None:
    steps = tuple(summary(n, samples=100 if n == 30 else 512) for n in range(1, 31))
    facts: dict[str, Any] = {"recent": steps, "watched_steps": 30, "mean_seconds": 0.1, "device": device}
    made = run(*(changed(rank(n), wait_seconds=0.02, **facts) for n in range(2)))
    assert [finding.rule for finding in advise(made)].count("uneven_work") == count

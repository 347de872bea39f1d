"""The text report."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise

from builders import changed, deepspeed_facts, device_memory, rank, run, summary
from evidence import row as traffic_row

from zeromon.base.units import wrap_paragraph
from zeromon.cli.terminal import style_output
from zeromon.diagnosis.engine import advise
from zeromon.readout.communication_report import by_operation
from zeromon.readout.death_report import deaths
from zeromon.readout.report import render_answers, render_run
from zeromon.readout.text import run_state
from zeromon.snapshot import Finding, RankSnapshot, Severity
from zeromon.snapshot.communication import CollectiveRow, InFlight
from zeromon.snapshot.memory import OutOfMemory, RoleRow
from zeromon.snapshot.rank import Setting
from zeromon.snapshot.step import StepRange

GIB = 1 << 30


def test_the_report_names_a_death() -> None:
    """Rank, signal, last step, and what it was doing."""
    flying = InFlight(
        op="reduce_scatter", group="world", sequence=77, unit="layers.3", phase="backward",
        nbytes=1, issued_ns=5,
    )  # fmt: skip
    dead = rank(
        1, alive=False, failed=True, ended="SIGKILL", phase="backward", unit="layers.3",
        in_flight=(flying,),
    )  # fmt: skip
    snapshot = run(rank(0), dead, ended=True)
    text = render_run(replace(snapshot, findings=advise(snapshot)))
    assert run_state(snapshot) == "died: rank 1, SIGKILL, after step 20"
    assert "rank 1: SIGKILL; last seen in step 21, in backward, unit layers.3" in text
    assert "reduce_scatter #77 of group world in flight" in text


def test_the_cause_is_told_apart_from_what_the_launcher_stopped() -> None:
    """The rank that was killed, not the ones that torchrun then ended, whoever wrote last."""
    stopped = rank(0, failed=True, ended="SIGTERM", alive=False, last_event_ns=1)
    killed = rank(1, failed=True, ended="SIGKILL", alive=False, last_event_ns=2)
    assert run_state(run(stopped, killed)) == "died: rank 1, SIGKILL, after step 20; rank 0 died of it"
    assert run_state(run(stopped)) == "stopped by SIGTERM after step 20"
    sender = "Ends: the launcher, the scheduler or a user sent the signals\n"
    assert deaths(run(stopped)).startswith(sender)
    assert deaths(run(stopped, killed)).startswith("Deaths\n")
    by_hand = changed(killed, ended="exception", exception="KeyboardInterrupt: ")
    assert run_state(run(by_hand)) == "stopped by Ctrl-C after step 20"


def test_findings_of_an_ended_run_say_how_long_they_held() -> None:
    """Those up to the end among the findings; those that were over before in a block of their own."""
    late = Finding(
        rule="straggler", code="ZM309", severity=Severity.WARNING, text="is late", rank=1,
        came=1000.0, gone=1090.0,
    )  # fmt: skip
    starved = Finding(
        rule="cpu_starved", code="ZM605", severity=Severity.WARNING, text="has no CPU", rank=0,
        came=500.0, gone=520.0,
    )  # fmt: skip
    again, small = replace(starved, came=600.0, gone=610.0), replace(late, severity=Severity.INFO)
    ended = replace(run(rank(0), ended=True), findings=(late,))
    text = render_run(ended, past=[late, starved, again, replace(small, rule="other")])
    assert " ! ZM309 rank 1: is late (lasted 90.00 s, until the run ended)" in text
    block = text.partition("Earlier findings\n")[2]
    assert block.startswith("  ZM605 2 times, for 30.00 s in total, last began ")
    assert "rank 0: has no CPU" in block and "is late" not in block


def test_the_report_of_a_run_without_ranks_says_why() -> None:
    """Nobody reported."""
    text = render_run(run(ended=True, note="no rank ever reported"))
    assert "no rank ever reported" in text


def test_the_report_fits_a_terminal_and_cuts_a_thousand_ranks() -> None:
    """No line over 100 columns; the rest is counted."""
    text = style_output(render_run(run(*(rank(n) for n in range(200)))), 100, coloured=False)
    assert "and 168 more ranks" in text
    assert max(len(line) for line in text.splitlines()) <= 100


def test_a_sentence_of_the_report_is_wrapped_once() -> None:
    """A row of a paragraph ends where the next word does not fit: no second wrapping cut it short."""
    answers = render_answers(run(rank(0), rank(1), ended=True))
    paragraphs = [line for line in answers.splitlines() if line[:2] == "  " and len(line) > 60]
    assert len(paragraphs) > 1
    for paragraph in paragraphs:
        rows = style_output(paragraph, 60, coloured=False).splitlines()
        assert len(rows) > 1
        for row, following in pairwise(rows):
            assert len(row) + 1 + len(following.split()[0]) > 50
            assert following.startswith("    ")


def test_the_report_shows_engines_roles_offload_and_configuration() -> None:
    """Written settings with what took effect; defaults only where they explain much."""
    rows = (
        Setting(engine=1, name="zero_optimization.stage", effective="3", written="3"),
        Setting(engine=1, name="zero_optimization.overlap_comm", effective="true", written=""),
        Setting(engine=1, name="zero_optimization.sub_group_size", effective="1", written=""),
        Setting(engine=1, name="train_batch_size", effective="8", written="auto"),
    )
    text = render_run(run(rank(0, **{**deepspeed_facts(), "settings": rows})))
    for part in (
        "1 deepspeed-zero3", "65536", "master param", "7 B", "disk read", "25 MB/s", "2.0 TiB free",
        "zero_optimization.overlap_comm  true  (default)", "8  (written: auto)",
        "25 MB/s  30 MB/s  100 MB/s", "100 MB/s is what its cgroup allows",
        "while busy it moves 50 MB/s, with 2.0 requests at once; at best it moved 80 MB/s",
    ):  # fmt: skip
        assert part in text, (part, text)
    assert "sub_group_size" not in text


def test_a_failed_allocation_on_the_device_is_explained() -> None:
    """What was asked for, what was free, the largest block, the largest roles, the slack."""
    roles = tuple(
        RoleRow(role=role, device_bytes=n * GIB, host_bytes=0, disk_bytes=0, pinned_bytes=0)
        for role, n in (("optimizer_state", 20), ("sharded_param", 9), ("buffer", 1))
    )
    oom = OutOfMemory(
        requested_bytes=3 * GIB, free_bytes=GIB, total_bytes=80 * GIB, largest_block_bytes=2 * GIB
    )
    recent = tuple(summary(n, allocated_bytes=70 * GIB) for n in range(1, 60))
    one = rank(
        0, memory_device=device_memory(), roles=roles, out_of_memory=oom, alive=False, failed=True,
        ended="exception", exception="OutOfMemoryError: CUDA out of memory", recent=recent,
        last_event_ns=recent[-1].end_ns,
    )  # fmt: skip
    text = render_run(run(one))
    assert "asked for 3.0 GiB; 1.0 GiB of 80.0 GiB were free on the device" in text
    assert "the largest block in the cache was 2.0 GiB" in text
    assert "most of it: activation + temp 40.0 GiB, " in text
    largest = text.split("most of it")[1].splitlines()[0]
    assert "optimizer state 20.0 GiB" in largest and "unallocated" not in largest
    assert "reserved and not allocated at the last sample" in text
    assert "before  step" in text


def test_ranks_that_run_out_alike_are_explained_once() -> None:
    """The message names each rank's own GPU; another error, and other sizes, stand in full."""

    def dead(number: int, free_bytes: int = GIB, text: str = "CUDA out of memory") -> RankSnapshot:
        oom = OutOfMemory(
            requested_bytes=3 * GIB, free_bytes=free_bytes, total_bytes=80 * GIB, largest_block_bytes=-1
        )
        return rank(
            number, memory_device=device_memory(), out_of_memory=oom, alive=False, failed=True,
            ended="exception", exception=f"OutOfMemoryError: {text}. GPU {number} has 80 GiB",
        )  # fmt: skip

    text = deaths(run(dead(0), dead(1), dead(2, free_bytes=0), dead(3, text="no")))
    assert text.count("asked for 3.0 GiB") == 3 and text.count("    like rank 0") == 1
    assert "GPU 0 has" in text and "GPU 1 has" not in text
    assert "most of it" not in text, "no role is known: nothing says what fills the memory"


def test_a_long_run_is_told_over_time() -> None:
    part = StepRange(
        first_step=1, last_step=5000, step_seconds=0.1, exposed_ratio=0.25, rss_bytes=GIB,
        reserved_bytes=-1,
    )  # fmt: skip
    text = render_run(run(rank(0)), [part, replace(part, first_step=5001, last_step=9999)])
    assert "Over the whole run" in text
    assert "1 to 5,000" in text and "5,001 to 9,999" in text and "25.0 %" in text
    assert "Over the whole run" not in render_run(run(rank(0)))


def test_the_bus_bandwidth_of_buckets_is_that_of_their_units() -> None:
    """DDP times its buckets: 342 MB/s in the table of units is not `-` in that of operations."""
    flow = (
        traffic_row("all_reduce", unit="bucket 0", nbytes=3e6, busbw_bytes_per_second=3e8),
        traffic_row("all_reduce", unit="bucket 1", nbytes=1e6, busbw_bytes_per_second=1e8),
    )
    both = (
        CollectiveRow(op="all_reduce", group=flow[0].group, group_size=2, count=9, timed=0, nbytes=9,
                      quantized_bytes=0, nodes=1, seconds=2.0, exposed_seconds=1.0,
                      busbw_bytes_per_second=None, best_busbw_bytes_per_second=0.0),
        CollectiveRow(op="broadcast", group=flow[0].group, group_size=2, count=4, timed=4, nbytes=9,
                      quantized_bytes=0, nodes=1, seconds=0.01, exposed_seconds=0.0,
                      busbw_bytes_per_second=None, best_busbw_bytes_per_second=1.19e9),
    )  # fmt: skip
    lines = by_operation(run(rank(0, collectives=both, traffic=flow))).splitlines()
    assert lines[-3].split()[-2:] == ["200", "MB/s"]  # 4 MB in 20 ms
    assert lines[-2].split()[-1] == "n/a"
    assert lines[-1] == "  busbw n/a: when broadcast begins or ends is not seen"


def test_a_number_and_its_unit_are_not_parted_at_the_end_of_a_line() -> None:
    text = "data wait 0.0 %, own code 1.3 %, 5 MB/s, 3 ms and 4 steps"
    for width in range(12, 60):
        lines = wrap_paragraph(text, width, "  ", "  ")
        assert " ".join(line.strip() for line in lines) == text
        assert all(len(line) <= width for line in lines)
        assert not any(line.strip()[:1] == "%" or line.strip()[:2] in ("MB", "ms") for line in lines)

"""The terminal view: what it draws, at three sizes, and that it comes and goes cleanly."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest
from core.build import deepspeed_facts, device_memory, rank, run, summary
from rich.text import Text
from textual.pilot import Pilot

from zeromon.advice import advise
from zeromon.errors import CaptureRefused, RunNotFound, SourceError
from zeromon.exporter import start_server
from zeromon.snapshot import Capture, Finding, InFlight, Remedy, Risk, RunSnapshot, TraceCheck
from zeromon.source import LiveSource
from zeromon.tui import renderables
from zeromon.tui.app import ZeromonApp
from zeromon.tui.widgets.ranks import Ranks

MS = 1_000_000


def wave(number: int, shift: int) -> float:
    """A figure that repeats every 16 steps."""
    return 10 + ((number + shift) * 5 % 16)


def picture(ranks: int = 2, steps: int = 160) -> RunSnapshot:
    """A run with something to see."""
    made = []
    for n in range(ranks):
        recent = tuple(
            summary(
                s,
                exposed_ns=round(wave(s, 3 * n) * MS),
                idle=s % 32 == 0,
                reserved_bytes=round((40 + s / 8 + n) * (1 << 30)),
            )
            for s in range(1, steps + 1)
        )
        risk = Risk(
            pool="device", ratio=0.62 if n else 0.31, cause="growth", steps_left=380.0,
            used_bytes=61 << 30, capacity_bytes=80 << 30,
        )  # fmt: skip
        made.append(
            rank(
                n, recent=recent, step=steps, steps=steps, memory=device_memory(),
                device=f"cuda:{n}", risks=(risk,), exposed_ratio=0.17 - n / 50,
                overlap_ratio=0.61 + n / 50, overhead_ratio=0.001, overhead_noise_ratio=0.002,
                phase="backward", unit=f"layers.{n}", world_size=ranks,
            )
        )  # fmt: skip
    base = run(*made, run="train_gpt-091500-abc")
    return replace(base, findings=advise(base))


class FixedSource:
    """Gives the same picture for ever, or raises."""

    def __init__(self, answer: RunSnapshot | Exception) -> None:
        self.answer = answer

    def latest(self) -> RunSnapshot:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


async def settled(pilot) -> None:  # type: ignore[no-untyped-def]
    for _ in range(100):
        await pilot.pause()
        if pilot.app.run_shown is not None:
            break
        await asyncio.sleep(0.01)
    await pilot.pause()


@pytest.mark.parametrize("size", [(80, 24), (120, 40), (200, 60)], ids=lambda s: f"{s[0]}x{s[1]}")
def test_the_view_at_three_sizes(snap_compare: Callable[..., bool], size: tuple[int, int]) -> None:
    """As an SVG picture that is kept beside this file."""
    assert snap_compare(ZeromonApp(FixedSource(picture(2))), terminal_size=size, run_before=settled)


def screen_text(app: ZeromonApp) -> str:
    """What is on the screen, without colours."""
    width, height = app.size
    lines = app.screen._compositor.render_strips()
    return "\n".join("".join(s.text for s in strip)[:width] for strip in lines[:height])


async def test_what_matters_fits_80x24() -> None:
    """Risk, exposed share, both ranks, the gravest finding, the keys."""
    app = ZeromonApp(FixedSource(picture(2)))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        text = screen_text(app)
    for part in (
        "train_gpt-091500-abc", "OOM risk 62.0 %", "full in ~380 steps", "exposed", "17.0 %",
        "backward", "device memory runs out at about step 540", "Quit", "Pause",
    ):  # fmt: skip
        assert part in text, (part, text)


@pytest.mark.parametrize("no_color", [False, True])
async def test_it_runs_with_and_without_colour(
    monkeypatch: pytest.MonkeyPatch, no_color: bool
) -> None:
    """NO_COLOR draws the same words."""
    if no_color:
        monkeypatch.setenv("NO_COLOR", "1")
    app = ZeromonApp(FixedSource(picture(40)))
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        await pilot.resize_terminal(60, 15)
        await pilot.resize_terminal(160, 50)
        await pilot.pause()
        assert "layers.0" in screen_text(app)


async def test_keys_quit_pause_and_sort() -> None:
    """Space holds the picture; s puts the most exposed rank first; q leaves with 0."""
    source = FixedSource(picture(2))
    app = ZeromonApp(source, every_seconds=0.08)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        await pilot.press("space")
        assert "paused" in screen_text(app)
        source.answer = replace(picture(2), run="other")
        await asyncio.sleep(0.1)
        await pilot.pause()
        assert app.run_shown is not None
        assert app.run_shown.run == "train_gpt-091500-abc"
        await pilot.press("space")
        await asyncio.sleep(0.1)
        await pilot.pause()
        assert app.run_shown.run == "other"
        await pilot.press("s", "s")
        assert [r.rank for r in app.query_one(Ranks)._ranks] == [1, 0]
        await pilot.press("q")
    assert app.return_code == 0


async def test_a_collector_that_is_gone_is_said_and_the_picture_stays() -> None:
    """Degraded, not dead."""
    source = FixedSource(picture(2))
    app = ZeromonApp(source, every_seconds=0.05)
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        source.answer = SourceError("no collector answers at 127.0.0.1:1")
        await asyncio.sleep(0.1)
        await pilot.pause()
        text = screen_text(app)
        assert "no collector answers" in text
        assert "backward" in text
        source.answer = RunNotFound("gone")
        await asyncio.sleep(0.1)
        await pilot.pause()
        assert "the run has ended" in screen_text(app)


async def test_before_the_first_rank_it_waits() -> None:
    """An empty run is not an error."""
    app = ZeromonApp(FixedSource(run()))
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        assert "waiting for the first rank" in screen_text(app)


def test_a_thousand_ranks_draw_as_fast_as_are_shown() -> None:
    """The charts show their highest and lowest."""
    one = picture(1).ranks[0]
    many = run(*(replace(one, rank=n) for n in range(1024)))
    assert [name for name, _ in renderables.memory_series(many)] == ["max", "min"]
    assert [name for name, _ in renderables.exposed_series(many)] == ["max", "min"]


def test_a_chart_puts_the_newest_value_at_the_right_edge() -> None:
    """A step from 0 to 10: bottom on the left, top on the right, a line over the gap."""
    lines = chart_text([0.0] * 10 + [None] * 4 + [10.0] * 6)
    assert lines[0].rstrip().endswith("⡏⠉⠉")
    assert "⣀" in lines[-1]
    assert lines[0].startswith("    10 ")
    assert chart_text([1.0], width=9) == []


def chart_text(values: list[float | None], width: int = 17) -> list[str]:
    return [line.plain for line in renderables.chart([("a", values)], width, 4)]


def test_axes_end_on_round_numbers() -> None:
    """So that they do not twitch."""
    ceilings = [renderables.nice_ceiling(v) for v in (0, 0.3, 1, 7, 12, 80)]
    assert ceilings == [1.0, 0.5, 1.0, 10, 20, 100]


def test_lines_are_cut_to_the_width() -> None:
    """Hostile and long names included."""
    stuck = InFlight(
        op="all_gather",
        group="g" * 300,
        sequence=1,
        unit="",
        phase="forward",
        nbytes=1,
        issued_ns=0,
    )
    one = rank(0, unit="u" * 300, in_flight=(stuck,), strategy="s" * 300)
    made = run(one, run="r" * 80)
    finding = Finding(rule="x", severity="critical", text="t" * 500)
    lines: list[Text] = [
        renderables.header(made, 80),
        renderables.risk_line(made, 80),
        renderables.rank_header(80),
        renderables.rank_line(one, 80),
        renderables.finding_line(finding, 80),
    ]
    assert all(line.cell_len <= 80 for line in lines)


async def test_c_shows_the_configuration_and_c_goes_back() -> None:
    """Engines, roles, offload, settings; the first view comes back as it was."""
    source = FixedSource(run(rank(0, **deepspeed_facts()), run="zero"))
    app = ZeromonApp(source)
    async with app.run_test(size=(80, 24)) as pilot:
        await settled(pilot)
        await pilot.press("c")
        await pilot.pause()
        text = screen_text(app)
        for part in ("DeepSpeed engines", "deepspeed-zero3", "master param", "disk read", "Back"):
            assert part in text, (part, text)
        await pilot.press("c")
        await pilot.pause()
        assert "OOM risk" in screen_text(app)
        source.answer = run(rank(0), run="plain")
    assert "nothing to show" in renderables.details(run(rank(0))).plain


async def test_u_shows_what_communicates_by_unit() -> None:
    check = TraceCheck(
        steps=(3, 4), live_exposed_seconds=1.1, trace_exposed_seconds=1.0,
        live_communication_seconds=2.0, trace_communication_seconds=2.0,
    )  # fmt: skip
    app = ZeromonApp(FixedSource(run(rank(0, check=check))))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        assert "± 10 %" in screen_text(app)
        await pilot.press("u")
        await pilot.pause()
        text = screen_text(app)
        for part in ("What rank 0 waits for", "layers.0", "all_gather", "by size", "+10.0 % off"):
            assert part in text, (part, text)
        await pilot.press("u")
        await pilot.pause()
        assert "OOM risk" in screen_text(app)
    assert "no collective" in renderables.communication(run(rank(0, traffic=(), sizes=()))).plain


class Collector:
    """Takes a request for a trace, and goes on with it picture by picture."""

    def __init__(self) -> None:
        self.view = (run(rank(0)),)
        self.refuses = ""

    def was_read(self) -> None:
        pass

    def trace(self, name: str, steps: int, ranks: list[int]) -> Capture:
        if self.refuses:
            raise CaptureRefused(self.refuses)
        made = Capture(number=1, state="waiting", first=30, steps=steps, ranks=(0,), folder="/f")
        self.view = (replace(self.view[0], capture=made),)
        return made


async def told(app: ZeromonApp, pilot: Pilot[int], part: str) -> bool:
    """Whether a notification says so, soon."""
    for _ in range(100):
        await pilot.pause()
        if any(part in note.message for note in app._notifications):
            return True
        await asyncio.sleep(0.02)
    return False


async def test_t_asks_for_a_trace_and_tells_how_far_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROMON_TOKEN", "secret")
    collector = Collector()
    server = start_server(collector, "127.0.0.1", 0, "secret")
    source = LiveSource(f"127.0.0.1:{server.server_port}", "train-1")
    app = ZeromonApp(source, every_seconds=0.05)
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("t")
        assert await told(app, pilot, "trace 1: begins with step 30, step 20 has ended")
        made = collector.view[0].capture
        assert made is not None and made.steps == 2
        done = replace(made, state="done", files=("/f/rank0.json",))
        collector.view = (replace(collector.view[0], capture=done),)
        assert await told(app, pilot, "trace 1: 1 files in /f")
        collector.refuses = "trace 1 of this run is still recording"
        await pilot.press("t")
        assert await told(app, pilot, "still recording")
    server.shutdown()


async def test_without_a_live_run_t_says_why_not() -> None:
    app = ZeromonApp(FixedSource(run(rank(0))))
    async with app.run_test(size=(120, 40)) as pilot:
        await settled(pilot)
        await pilot.press("t")
        assert await told(app, pilot, "needs a live run")


async def test_f_shows_every_finding_with_its_way_out() -> None:
    """Cause, diff, what it is expected to do and its price; it scrolls."""
    found = Finding(
        rule="data_wait", code="ZM601", severity="warning", text="20.0 ms a step", rank=1,
        remedy=Remedy(
            cause="no workers", dialect="Python (DataLoader)",
            diff="- DataLoader(data)\n+ DataLoader(data, num_workers=4)",
            gain_low_seconds=0.01, gain_high_seconds=0.02, price="4 processes",
        ),
    )  # fmt: skip
    app = ZeromonApp(FixedSource(run(rank(0), findings=(found,))))
    async with app.run_test(size=(100, 30)) as pilot:
        await settled(pilot)
        await pilot.press("f")
        await pilot.pause()
        text = screen_text(app)
        for part in ("ZM601 rank 1: 20.0 ms", "because no workers", "+ DataLoader(data, num_workers=4)",
                     "a step 10.0 ms to 20.0 ms shorter", "price: 4 processes"):  # fmt: skip
            assert part in text, (part, text)
        await pilot.press("f")
        await pilot.pause()
        assert "OOM risk" in screen_text(app)
    assert "nothing to report" in renderables.findings_page(run(rank(0))).plain

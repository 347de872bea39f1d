"""Opens the terminal view of a live run.

TARGET is a run id (or its beginning), the pid of a rank, or host:port of a collector. Without TARGET,
zeromon lists the live runs of this user on this node. `?` shows all keys, `q` quits; the run is not
disturbed.

--replay plays the record of a run from its first snapshot: TARGET is a run id or its beginning (default:
the newest run). Space pauses and continues, the arrow keys move to earlier and later snapshots, < and >
change the speed.

--track NAME opens no view. It sends the figures of a live run to an experiment tracker until the run
has ended, as `zeromon run --track NAME` does from the start. The agent finds the run that the script
has opened there; without one nothing is sent. docs/how-to/trackers.md has the details.

Without a terminal, or for a screen reader: --plain prints one line per step, --json prints one snapshot.
In a browser: textual serve "zeromon attach RUN" (pip install textual-dev).

To watch a process not started with `zeromon run`, give its pid or its launcher's pid (torchrun,
deepspeed, accelerate, srun) as TARGET; --all means all ranks of the job on this node.
Training continues meanwhile and needs no preparation; zeromon detach removes the agent again. It needs
the same user and the permission to trace: docs/how-to/attach.md.

For a run on several nodes, --prometheus URL reads it from the Prometheus that scrapes its collectors, or
from a server with the same API (VictoriaMetrics, Mimir, Thanos), with any number of ranks.
URL defaults to ZEROMON_PROMETHEUS if no TARGET is given; ZEROMON_PROMETHEUS_TOKEN is sent as a bearer
token.
"""

import argparse
import os
import sys
from collections.abc import Sequence

from zeromon.base.errors import SourceError
from zeromon.base.units import printable
from zeromon.cli import attach_process
from zeromon.cli.attach_track import track_run
from zeromon.cli.parser import add_flag, add_option, add_server, in_range, whole
from zeromon.export.trackers import TRACKERS, check_tracker
from zeromon.sources.base import Source
from zeromon.sources.live import find_live_runs, only_live_run
from zeromon.sources.prometheus import source as fleet
from zeromon.sources.prometheus.client import Server, chosen_server
from zeromon.sources.replay import ReplaySource, reopen_run_source
from zeromon.storage.run_store import encode_snapshot
from zeromon.tui.columns import DisplayOptions


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon attach [TARGET | --prometheus URL] [--plain | --json | --replay | --track NAME]``"""
    parser.add_argument("target", nargs="?", help="run id, pid or host:port")
    modes = parser.add_mutually_exclusive_group()
    add_flag(modes, "--plain", "print one line per step until the run ends")
    add_flag(modes, "--json", "print one snapshot as JSON and exit")
    add_flag(modes, "--replay", "play the record of TARGET")
    modes.add_argument(
        "--track", choices=tuple(TRACKERS), metavar="NAME",
        help=f"send the figures of the run to {', '.join(TRACKERS)}",
    )  # fmt: skip
    add_option(
        parser, "--speed", "X",
        "with --replay: playback speed, in run seconds per second", in_range(0, 1e6, above=True), 10,
    )  # fmt: skip
    attach_process.add_arguments(parser)
    add_server(parser)
    add_option(
        parser, "--run", "R",
        "with --prometheus: the run's name or its beginning, or 'NAME{cluster=\"a\"}'",
    )  # fmt: skip
    add_option(
        parser, "--every", "S",
        "refresh interval in seconds (default: 1; with --track: 5)", in_range(0.1, 3600),
    )  # fmt: skip
    parser.add_argument(
        "--theme",
        default=os.environ.get("ZEROMON_THEME", ""),
        help="zeromon-dark, zeromon-light, zeromon-contrast, ansi-dark, ... (default: ZEROMON_THEME)",
    )
    add_option(
        parser, "--tokens-per-step", "N",
        "tokens per step of all ranks together, in place of those measured", whole, 0,
    )  # fmt: skip
    add_option(
        parser, "--peak-tflops", "X",
        "dense peak of one device in the training data type, for MFU", in_range(0), 0.0,
    )  # fmt: skip


def call(options: argparse.Namespace) -> int:
    """Finds the run, attaches to it first where it has no agent, and shows it."""
    local = bool(options.target or options.all or options.replay or options.track)
    server = chosen_server(options.prometheus, named=local)
    if server is None and options.run:
        raise SourceError("--run needs --prometheus URL", "Without it, give the run as TARGET.")
    if server is not None:
        if local:
            raise SourceError(
                "TARGET, --all, --replay and --track name runs of this node",
                "Use --run with --prometheus.",
            )
        return _show_source(_open_server_run(server, options), options)
    if options.replay:
        return _open_terminal_view(ReplaySource(options.target, speed=options.speed), options)
    # Before the attach: a tracker that is not installed must leave no agent in the ranks
    if options.track:
        check_tracker(options.track)
    code = attach_process.attach_first(options)
    if code is not None:
        return code
    runs = find_live_runs(options.target)
    rows = [f"{r.run}  {r.ranks} ranks, {r.state}  {' '.join(r.command)[:60]}" for r in runs]
    # With --json, a question would hold up the script that reads the output
    at = None if options.json else _choose_run_row(rows)
    source = (only_live_run(runs) if at is None else runs[at]).open()
    if options.track:
        return track_run(options.track, source, options.every or 5)
    return _show_source(source, options)


def _open_server_run(server: Server, options: argparse.Namespace) -> Source:
    """The run of *server* that --run names; lets the user choose among several."""
    runs = fleet.find_listed_runs(server, options.run)
    at = None if options.json else _choose_run_row([f"{run.run}  {run.state}" for run in runs])
    return (fleet.only_listed_run(runs) if at is None else runs[at]).open(server)


def _show_source(source: Source, options: argparse.Namespace) -> int:
    if options.json:
        run = source.latest()
        sys.stdout.write(encode_snapshot(run).decode() + "\n")
        return 1 if run.findings else 0
    return _print_steps(source, options) if options.plain else _open_terminal_view(source, options)


def _open_terminal_view(source: Source, options: argparse.Namespace) -> int:
    """Opens the terminal view of *source*; returns the exit code."""
    # Textual draws on stderr; in a browser, its own driver has pipes instead
    if not (sys.stdout.isatty() and sys.stderr.isatty()) and "TEXTUAL_DRIVER" not in os.environ:
        raise SourceError(
            "the terminal view needs a terminal", "Use --plain or --json, or zeromon report."
        )
    # Imported here: --json would wait for Textual's application and all screens to load
    from zeromon.tui.app import ZeromonApp

    return (
        ZeromonApp(
            source,
            every_seconds=options.every or 1,
            options=DisplayOptions(
                tokens_per_step=options.tokens_per_step, peak_flops=options.peak_tflops * 1e12
            ),
            theme=options.theme,
            reconnect=reopen_run_source,
        ).run()
        or 0
    )


def _print_steps(source: Source, options: argparse.Namespace) -> int:
    from zeromon.tui.plain import write_until_ended

    def write_row(row: str) -> None:
        sys.stdout.write(printable(row) + "\n")
        sys.stdout.flush()

    run = write_until_ended(
        source, write_row, every_seconds=options.every or 1,
        reconnect=(lambda ended: reopen_run_source(source.run, ended)) if source.relocatable else None,
    )  # fmt: skip
    return 1 if run is not None and run.findings else 0


def _choose_run_row(rows: Sequence[str]) -> int | None:
    """Lets the user choose one of *rows*; None for a single line, and without a terminal."""
    if len(rows) < 2 or not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    for number, row in enumerate(rows, 1):
        sys.stderr.write(f"  {number}  {printable(row)}\n")
    while True:
        sys.stderr.write(f"Which run? [1-{len(rows)}] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        # At Ctrl-D readline returns "" for ever, and the question would be repeated without end
        if not answer:
            return None
        if answer.strip().isdigit() and 1 <= int(answer) <= len(rows):
            return int(answer) - 1

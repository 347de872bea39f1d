"""Joins a live run with the terminal view.

TARGET is a run id (or its beginning), the pid of a rank, or host:port of a collector; without one,
the live runs of this user on this node are offered. `?` shows all keys, `q` leaves; the run is not
disturbed.

Where there is no terminal, or for a screen reader: --plain prints a line a step, --json the picture
once. In a browser: textual serve "zeromon attach RUN" (pip install textual-dev).

A process that was not started under zeromon is joined first: TARGET is its pid or its launcher's
(torchrun, deepspeed, accelerate, srun), and --all means all ranks of the job on this node. It goes on
meanwhile, needs no preparation, and can be left again with zeromon detach. Needed is the same user and
the right to trace: docs/attach.md.

Past one node: --prometheus URL reads the run from the Prometheus that scrapes its collectors, or from
what speaks its API (VictoriaMetrics, Mimir, Thanos), however many ranks there are. ZEROMON_PROMETHEUS is
its default where no TARGET is given; ZEROMON_PROMETHEUS_TOKEN is sent as a bearer token.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from zeromon.cli import join, servers
from zeromon.errors import SourceError
from zeromon.fleet import source as fleet
from zeromon.fleet.api import Server
from zeromon.fleet.source import PrometheusSource
from zeromon.source import LiveSource, Source, StoreSource, find, node_runs, only
from zeromon.store import Store, encode
from zeromon.tui.look import Look
from zeromon.units import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon attach [TARGET | --prometheus URL [--run R]] [--plain | --json]``"""
    parser.add_argument("target", nargs="?", help="run id, pid or host:port")
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--plain", action="store_true", help="one line a step, until the run ends")
    how.add_argument("--json", action="store_true", help="print the picture once and leave")
    join.add_arguments(parser)
    servers.add_argument(parser)
    parser.add_argument(
        "--run", metavar="R",
        help="with --prometheus: its name or the beginning of it, or 'NAME{cluster=\"a\"}'",
    )  # fmt: skip
    add_view_arguments(parser)


def add_view_arguments(parser: argparse.ArgumentParser) -> None:
    """What every verb takes that shows the terminal view."""
    parser.add_argument(
        "--every", type=_seconds, default=1.0, metavar="S", help="seconds between pictures (1)"
    )
    parser.add_argument(
        "--theme",
        default=os.environ.get("ZEROMON_THEME", ""),
        help="zeromon-dark, zeromon-light, zeromon-contrast, ansi-dark, ... (ZEROMON_THEME)",
    )
    parser.add_argument(
        "--tokens-per-step", type=int, default=0, metavar="N",
        help="tokens that all ranks together train on in a step: shows tokens/s",
    )  # fmt: skip
    parser.add_argument(
        "--peak-tflops", type=float, default=0.0, metavar="X",
        help="dense peak of one device in the type that is trained in: shows MFU with the former",
    )  # fmt: skip


def _seconds(text: str) -> float:
    value = float(text)
    if not 0.1 <= value <= 3600:
        raise argparse.ArgumentTypeError("between 0.1 and 3600 seconds")
    return value


def call(options: argparse.Namespace) -> int:
    """Finds the run, joins it first where it never loaded us, and shows it."""
    local = bool(options.target or options.all)
    server = servers.server_of(options, named=local)
    if server is None and options.run:
        raise SourceError("--run needs --prometheus URL", "Without it, give the run as TARGET.")
    if server is not None:
        if local:
            raise SourceError("TARGET and --all are of this node", "Use --run with --prometheus.")
        return _see(_listed(server, options), options)
    code = join.join_first(options)
    return _see(_found(options), options) if code is None else code


def _found(options: argparse.Namespace) -> LiveSource:
    """The run of this node that is meant."""
    found = find(options.target)
    if isinstance(found, LiveSource) or options.json:
        return only(found)
    lines = [
        f"{run.run}  {'ended' if run.ended else f'{run.ranks} ranks, step {run.steps}'}"
        f"  {' '.join(run.command)[:60]}"
        for run in found
    ]
    at = _choose(lines)
    return only(found) if at is None else LiveSource(found[at].address, found[at].run)


def _listed(server: Server, options: argparse.Namespace) -> PrometheusSource:
    """The run of a Prometheus that is meant."""
    found = fleet.find(server, options.run)
    if isinstance(found, PrometheusSource) or options.json:
        return fleet.only(found)
    at = _choose([f"{run.run}  {run.state}" for run in found])
    return fleet.only(found) if at is None else PrometheusSource(server, found[at].run)


def _see(source: LiveSource | PrometheusSource, options: argparse.Namespace) -> int:
    if options.json:
        run = source.latest()
        sys.stdout.write(encode(run).decode() + "\n")
        return 1 if run.findings else 0
    return _plain(source, options) if options.plain else show(source, options)


def look_of(options: argparse.Namespace) -> Look:
    """What the options say of how things are shown."""
    return Look(tokens_per_step=options.tokens_per_step, peak_flops=options.peak_tflops * 1e12)


def show(source: Source, options: argparse.Namespace) -> int:
    """The terminal view of *source*."""
    # Textual draws on stderr; in a browser, its own driver has pipes instead
    if not (sys.stdout.isatty() and sys.stderr.isatty()) and "TEXTUAL_DRIVER" not in os.environ:
        raise SourceError(
            "the terminal view needs a terminal", "Use --plain or --json, or zeromon report."
        )
    from zeromon.tui.app import ZeromonApp

    return (
        ZeromonApp(
            source,
            every_seconds=options.every,
            look=look_of(options),
            theme=options.theme,
            reconnect=again,
        ).run()
        or 0
    )


def again(run: str, gone: bool) -> Source | None:
    """*run* where it is to be found now: at a collector that came back, else, if *gone*, recorded."""
    for known in node_runs():
        if known.run == run:
            return LiveSource(known.address, run)
    return StoreSource(run) if gone and run in Store().names() else None


def _plain(source: LiveSource | PrometheusSource, options: argparse.Namespace) -> int:
    from zeromon.tui.plain import follow

    def write(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    run = follow(
        source, write, look_of(options), every_seconds=options.every,
        reconnect=(lambda gone: again(source.run, gone)) if isinstance(source, LiveSource) else None,
    )  # fmt: skip
    return 1 if run is not None and run.findings else 0


def _choose(lines: Sequence[str]) -> int | None:
    """Asks which of *lines* is meant; None where nobody answers."""
    if not (sys.stdin.isatty() and sys.stderr.isatty()):
        return None
    for number, line in enumerate(lines, 1):
        sys.stderr.write(f"  {number}  {printable(line)}\n")
    while True:
        sys.stderr.write(f"which one? [1-{len(lines)}] ")
        sys.stderr.flush()
        answer = sys.stdin.readline()
        if not answer:
            return None
        if answer.strip().isdigit() and 1 <= int(answer) <= len(lines):
            return int(answer) - 1

"""Replays a recorded run in the live views, at any speed.

RUN is a run id or its beginning (default: the newest run). In the terminal, space pauses and continues,
the arrow keys move to earlier and later snapshots, < and > change the speed. With --dash, the dashboard
opens at the beginning of the run; the bar at its bottom plays the run.
"""

from __future__ import annotations

import argparse

from zeromon.cli import dash
from zeromon.cli.attach import add_view_arguments, show
from zeromon.sources.replay import ReplaySource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon replay [RUN] [--speed X] [--dash]``"""
    parser.add_argument("run", nargs="?", help="run id or its beginning (default: the newest)")
    parser.add_argument(
        "--speed",
        type=_speed,
        default=10.0,
        metavar="X",
        help="speed: seconds of the run per second (default: 10)",
    )
    parser.add_argument(
        "--dash", action="store_true", help="open the dashboard instead of the terminal view"
    )
    dash.add_server_arguments(parser)
    add_view_arguments(parser)


def _speed(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError("the speed must be above 0 and at most 1,000,000")
    return value


def call(options: argparse.Namespace) -> int:
    """Opens the view on the run's first snapshot."""
    source = ReplaySource(options.run, speed=options.speed)
    if options.dash:
        return dash.serve(options, source.run, source.playback.begin)
    return show(source, options)

"""Replays a recorded run in the live views, at any speed.

RUN is a run id or its beginning (default: the newest run). In the terminal, space pauses and continues,
the arrow keys move to earlier and later snapshots, < and > change the speed. With --dash, the dashboard
opens at the beginning of the run; the bar at its bottom plays the run.
"""

import argparse

from zeromon.cli import dash
from zeromon.cli.attach import add_view_arguments, show
from zeromon.cli.options import between, flag, option
from zeromon.sources.replay import ReplaySource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon replay [RUN] [--speed X] [--dash]``"""
    parser.add_argument("run", nargs="?", help="run id or its beginning (default: the newest)")
    option(
        parser, "--speed", "X",
        "speed: seconds of the run per second", between(0, 1e6, above=True), 10,
    )  # fmt: skip
    flag(parser, "--dash", "open the dashboard instead of the terminal view")
    dash.add_server_arguments(parser)
    add_view_arguments(parser)


def call(options: argparse.Namespace) -> int:
    """Opens the view on the run's first snapshot."""
    source = ReplaySource(options.run, speed=options.speed)
    if options.dash:
        return dash.serve(options, source.run, source.playback.begin)
    return show(source, options)

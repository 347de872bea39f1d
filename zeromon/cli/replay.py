"""Plays a recorded run: the live views on what they showed then, at any speed.

RUN is a run id or its beginning; without one, the newest. In the terminal, space stops and goes on, the
arrows go back and forth, < and > change the speed. With --dash the dashboard opens at the run's
beginning; its bar at the bottom plays.
"""

from __future__ import annotations

import argparse

from zeromon.cli import dash
from zeromon.cli.attach import add_view_arguments, show
from zeromon.replay import ReplaySource


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon replay [RUN] [--speed X] [--dash]``"""
    parser.add_argument("run", nargs="?", help="run id or its beginning (default: the newest)")
    parser.add_argument(
        "--speed", type=_speed, default=10.0, metavar="X", help="seconds of the run a second (10)"
    )
    parser.add_argument("--dash", action="store_true", help="in the dashboard instead")
    dash.add_server_arguments(parser)
    add_view_arguments(parser)


def _speed(text: str) -> float:
    value = float(text)
    if not 0 < value <= 1e6:
        raise argparse.ArgumentTypeError("more than 0, at most 1,000,000")
    return value


def call(options: argparse.Namespace) -> int:
    """Shows the run from its first moment on."""
    source = ReplaySource(options.run, speed=options.speed)
    if options.dash:
        return dash.serve(options, source.run, source.begin)
    return show(source, options)

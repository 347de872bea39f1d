"""Writes dashboards for Grafana: fleet, run, rank, communication.

  zeromon grafana dashboards -o dashboards/        four JSON files, to be imported or provisioned

Each asks for its Prometheus when it is opened; no query needs our recording rules. docs/grafana.md has a
recipe for Grafana and Prometheus beside a job, without docker. Needs pip install 'zeromon[grafana]'.
"""

from __future__ import annotations

import argparse
import importlib
from pathlib import Path
from typing import Any

from zeromon.cli.output import write
from zeromon.errors import ExportError
from zeromon.prometheus.boards import BOARDS
from zeromon.units import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon grafana dashboards [-o DIR]``"""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    made = what.add_parser("dashboards", help="a JSON file a dashboard")
    made.add_argument(
        "-o", "--output", metavar="DIR", default=".", help="folder (default: this one)"
    )


def call(options: argparse.Namespace) -> int:
    """Writes a file a dashboard."""
    try:
        grafana: Any = importlib.import_module("zeromon.prometheus.grafana")
    except ImportError as error:
        raise ExportError(
            f"dashboards need what is not installed ({error.name})",
            "pip install 'zeromon[grafana]'",
        ) from error
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write {printable(str(folder))}: {error.strerror}") from error
    for board in BOARDS:
        write(grafana.document(board), str(folder / f"{board.uid}.json"))
    return 0

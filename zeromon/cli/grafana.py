"""Writes dashboards for Grafana: fleet, run, rank, communication.

  zeromon grafana dashboards -o dashboards/        four JSON files to import or provision

A dashboard asks for its Prometheus when it is opened; no query needs the recording rules.
docs/grafana.md describes Grafana and Prometheus beside a job, without docker. Needs pip install
'zeromon[grafana]'.
"""

import argparse
from pathlib import Path

from zeromon.cli.options import option
from zeromon.cli.output import package, write
from zeromon.errors import ExportError
from zeromon.export.prometheus.dashboards import BOARDS
from zeromon.units import printable


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon grafana dashboards [-o DIR]``"""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    made = what.add_parser("dashboards", help="write a JSON file per dashboard")
    option(made, "-o --output", "DIR", "folder (default: this one)", default=".")


def call(options: argparse.Namespace) -> int:
    """Writes one file per dashboard."""
    grafana = package("zeromon.export.prometheus.grafana", "a dashboard", "grafana")
    folder = Path(options.output)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ExportError(f"cannot write {printable(str(folder))}: {error.strerror}") from error
    for board in BOARDS:
        write(grafana.document(board), str(folder / f"{board.uid}.json"))
    return 0

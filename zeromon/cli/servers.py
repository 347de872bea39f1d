"""The option ``--prometheus`` of several verbs."""

import argparse
import os

from zeromon.cli.parser import add_option
from zeromon.sources.prometheus.client import Server


def add_argument(parser: argparse._ActionsContainer) -> None:
    """``--prometheus URL``"""
    add_option(
        parser, "--prometheus", "URL",
        "read from this server: http://host:9090, https://host/prometheus (ZEROMON_PROMETHEUS)",
    )  # fmt: skip


def server_of_options(options: argparse.Namespace, *, named: bool = False) -> Server | None:
    """The server that the options name; that of the environment only where no local run is *named*."""
    default = "" if named else os.environ.get("ZEROMON_PROMETHEUS", "")
    url = options.prometheus or default
    return Server(url) if url else None

"""Sends a test message to where `zeromon run --notify URL` would send alerts.

  zeromon notify ntfys://TOPIC                   one service, or several
  zeromon notify                                 those of ZEROMON_NOTIFY

Exit codes: 0 all services accepted it, 1 one did not, 2 a URL names no service. A message that was
accepted has not been read: look for it. Needs pip install 'zeromon[notify]'.
"""

import argparse
import os
import socket
import sys

from zeromon.cli import say
from zeromon.collector.notify import deliver, split_urls, target
from zeromon.errors import NotifyError
from zeromon.readout.alerts import Tone, message


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon notify [URL ...]``"""
    parser.add_argument("urls", nargs="*", metavar="URL", help="default: those of ZEROMON_NOTIFY")


def call(options: argparse.Namespace) -> int:
    """Sends the message to each service, and says which accepted it."""
    urls = options.urls or split_urls(os.environ.get("ZEROMON_NOTIFY", ""))
    if not urls:
        raise NotifyError("there is no URL, and no ZEROMON_NOTIFY")
    test = message(
        Tone.SUCCESS, "test: zeromon", (f"alerts from {socket.gethostname()} come here",)
    )
    failed = 0
    for to in [target(url) for url in urls]:
        if why := deliver(to.url, test):
            say(f"{to.name} did not accept the message: {why}")
            failed = 1
        else:
            sys.stdout.write(f"{to.name} has accepted the message\n")
    return failed

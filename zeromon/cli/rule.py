"""Explains a rule: its meaning, why it matters, what to change, and the cost of the change.

CODE is the code in findings and in zeromon check (ZM302), or the name of the rule (overlap_comm_off);
without CODE, all rules are listed, one per line.
"""

import argparse
import sys

from zeromon.diagnosis.pages import page, pages


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon rule [CODE]``"""
    parser.add_argument("rule", nargs="?", metavar="CODE", help="a code or a name")


def call(options: argparse.Namespace) -> int:
    """Prints a page, or the list of all."""
    if options.rule:
        found = page(options.rule)
        if sys.stdout.isatty():
            from rich.console import Console  # comes with textual
            from rich.markdown import Markdown

            Console().print(Markdown(f"# {found.code} {found.name}\n{found.text}"))
        else:
            sys.stdout.write(f"{found.code} {found.name}\n{found.text.rstrip()}\n")
        return 0
    width = max(len(found.name) for found in pages().values())
    for found in pages().values():
        sys.stdout.write(f"{found.code}  {found.name.ljust(width)}  {found.summary}\n")
    return 0

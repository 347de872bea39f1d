"""Explains a rule: its meaning, why it matters, what to change, and the cost of the change.

CODE is the code in findings and in zeromon check (ZM302), or the name of the rule (overlap_comm_off);
without CODE, all rules are listed, one per line.
"""

import argparse
import sys

from zeromon.diagnosis.rule import all_pages, find_page


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon rule [CODE]``"""
    parser.add_argument("rule", nargs="?", metavar="CODE", help="a code or a name")


def call(options: argparse.Namespace) -> int:
    """Prints a page, or the list of all."""
    if options.rule:
        rule_page = find_page(options.rule)
        if sys.stdout.isatty():
            from rich.console import Console  # comes with textual
            from rich.markdown import Markdown

            Console().print(Markdown(f"# {rule_page.code} {rule_page.name}\n{rule_page.text}"))
        else:
            sys.stdout.write(f"{rule_page.code} {rule_page.name}\n{rule_page.text.rstrip()}\n")
        return 0
    width = max(len(entry.name) for entry in all_pages().values())
    for rule_page in all_pages().values():
        sys.stdout.write(f"{rule_page.code}  {rule_page.name.ljust(width)}  {rule_page.summary}\n")
    return 0

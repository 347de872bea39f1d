"""Writes configuration for Prometheus (rules, alerts, scrape configuration) and dashboards for Grafana.

  zeromon prometheus rules -o zeromon-rules.yml
  zeromon prometheus config --sd http://node0:9417/sd --rules zeromon-rules.yml -o prometheus.yml
  prometheus --config.file=prometheus.yml
  zeromon prometheus dashboards -o boards/         four JSON files to import into Grafana or to provision

The /sd of any collector lists the collectors of all nodes of the job. The scrape configuration names the
file with the token, which Prometheus must be able to read. Rules aggregate ranks by run and by node;
alerts name the run, the rank, the node, and the rule page (zeromon rule ZM201). The dashboards fleet,
run, rank and communication ask for their Prometheus when they are opened and need no rules. In
docs/how-to, prometheus.md describes one machine, Slurm and Kubernetes, grafana.md Grafana beside a job.
"""

import argparse
import os
import re
from dataclasses import fields
from pathlib import Path
from typing import Any

from zeromon.base.errors import ExportError, os_errors_as
from zeromon.base.units import printable
from zeromon.cli.parser import add_list, add_option, in_range, write_text
from zeromon.export.prometheus import rules
from zeromon.ring import tokens

_DURATION = re.compile(r"([1-9][0-9]*(ms|[smhdwy]))+")
_HELP = {
    "oom_warning": "OOM risk of the warning, 0..1",
    "oom_critical": "OOM risk of the critical alert, 0..1",
    "exposed": "exposed communication of the alert, as a share of a step",
    "silent": "how long a missing collector whose ranks were alive raises an alert",
    "patience": "how long a condition that may pass must hold",
    "memory": "how long an alert about a death, an error or a loss lasts",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon prometheus rules|config|dashboards``"""
    actions = parser.add_subparsers(metavar="ACTION", required=True)
    sub = actions.add_parser("rules", help="print recording rules and alerts")
    add_option(sub, "-o --output", "FILE", "default: standard output")
    for field in fields(rules.Thresholds):
        is_time = isinstance(field.default, str)
        kind, number = ("TIME", _check_duration) if is_time else ("RATIO", in_range(0, 1))
        name = f"--{field.name.replace('_', '-')}"
        add_option(sub, name, kind, _HELP[field.name], number, field.default)
    add_option(
        sub, "--runbook-url", "URL",
        "where the pages of rules are, with {code} for the rule: annotation runbook_url", _page_url,
    )  # fmt: skip
    sub.set_defaults(document=_rules_document, write=_write_document)
    sub = actions.add_parser("config", help="print a scrape configuration")
    add_option(sub, "-o --output", "FILE", "default: standard output")
    add_list(sub, "--sd", "URL", "/sd of any collector of a job; once per job")
    add_list(sub, "--target", "HOST:PORT", "a collector; once per collector")
    add_option(
        sub, "--token-file", "FILE",
        "file with the token of the collectors (default: this user's, or ZEROMON_TOKEN_FILE)",
    )  # fmt: skip
    add_list(sub, "--rules", "FILE", "rule file to load")
    sub.add_argument("--interval", type=_check_duration, default="15s", help="scrape interval")
    sub.set_defaults(document=_scrape_document, write=_write_document)
    sub = actions.add_parser("dashboards", help="write Grafana's dashboards")
    add_option(sub, "-o --output", "DIR", "folder (default: this one)", default=".")
    sub.set_defaults(write=_write_dashboards)


def call(options: argparse.Namespace) -> int:
    """Writes what was asked for."""
    options.write(options)
    return 0


def _write_document(options: argparse.Namespace) -> None:
    import yaml

    # At its default width of 80, PyYAML folds PromQL expressions into several lines
    yaml_text = yaml.safe_dump(options.document(options), sort_keys=False, width=1000)
    write_text(yaml_text, options.output)


def _write_dashboards(options: argparse.Namespace) -> None:
    """Copies the dashboards of the package; tools/make_boards.py made them."""
    folder = Path(options.output)
    with os_errors_as(ExportError, f"write {printable(str(folder))}"):
        folder.mkdir(parents=True, exist_ok=True)
    for board in rules.BOARDS:
        write_text(board.read_text(encoding="utf-8"), str(folder / board.name))


def _rules_document(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {field.name: getattr(options, field.name) for field in fields(rules.Thresholds)}
    return rules.rule_document(rules.Thresholds(**chosen), options.runbook_url or "")


def _scrape_document(options: argparse.Namespace) -> dict[str, Any]:
    if not options.sd and not options.target:
        raise ExportError(
            "no target to scrape", "Name a job's --sd http://node0:9417/sd, or each --target HOST:PORT."
        )
    return rules.scrape_document(
        options.sd,
        options.target,
        token_file=options.token_file or _find_token_file(),
        interval=options.interval,
        rules=options.rules,
    )


def _find_token_file() -> str:
    if os.environ.get(tokens.TOKEN):
        raise ExportError(
            "ZEROMON_TOKEN is set, and Prometheus reads a token from a file",
            "Write the token into a private file, and name it: --token-file FILE.",
        )
    token_path = os.environ.get(tokens.TOKEN_FILE) or tokens.user_token_file()
    if token_path is None:
        raise ExportError("no private file can be made for the token", "Set XDG_STATE_HOME.")
    # Prometheus resolves a relative path from the folder of its own configuration
    return str(Path(token_path).absolute())


def _page_url(url: str) -> str:
    if "{code}" not in url:
        raise argparse.ArgumentTypeError(f"{url!r} has no {{code}}")
    return url


def _check_duration(duration: str) -> str:
    if not _DURATION.fullmatch(duration):
        raise argparse.ArgumentTypeError(f"{duration!r} is not a time like 30s, 5m, 1h30m")
    return duration

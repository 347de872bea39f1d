"""Prints what Prometheus is to be told: recording rules and alerts, and what to scrape.

  zeromon prometheus rules -o zeromon-rules.yml
  zeromon prometheus config --sd http://node0:9417/sd --rules zeromon-rules.yml -o prometheus.yml
  prometheus --config.file=prometheus.yml

One /sd lists the collectors of all nodes of its job. Rules add ranks up by run and by node; alerts name
the run, the rank, the node, and the page that explains them (zeromon rule ZM201). docs/prometheus.md has
recipes for one machine, Slurm and Kubernetes.
"""

from __future__ import annotations

import argparse
import re
from dataclasses import fields
from typing import Any

from zeromon.cli.output import write
from zeromon.errors import ExportError
from zeromon.prometheus import config, rules

_DURATION = re.compile(r"([1-9][0-9]*(ms|[smhdwy]))+")
_HELP = {
    "oom_warning": "risk of running out of memory, 0..1, that is warned of",
    "oom_critical": "risk that is critical",
    "exposed": "share of a step that waits for communication",
    "silent": "for how long a collector is missed that has gone with its ranks alive",
    "patience": "for how long what may pass must hold",
    "memory": "for how long a death, an error or a loss is told of",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """``zeromon prometheus rules|config``"""
    what = parser.add_subparsers(metavar="WHAT", required=True)
    made = what.add_parser("rules", help="recording rules and alerts")
    made.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    for field in fields(rules.Thresholds):
        made.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=_duration if isinstance(field.default, str) else _share,
            default=field.default,
            metavar="TIME" if isinstance(field.default, str) else "RATIO",
            help=f"{_HELP[field.name]} (default {field.default})",
        )
    made.set_defaults(document=_rules)
    made = what.add_parser("config", help="a scrape configuration")
    made.add_argument("-o", "--output", metavar="FILE", help="default: standard output")
    made.add_argument(
        "--sd", metavar="URL", action="append", default=[],
        help="/sd of any collector of a job, once a job",
    )  # fmt: skip
    made.add_argument(
        "--target", metavar="HOST:PORT", action="append", default=[], help="a collector, once each"
    )
    made.add_argument(
        "--token-file", metavar="FILE", default="",
        help="holds the ZEROMON_TOKEN of collectors that do not listen on loopback",
    )  # fmt: skip
    made.add_argument("--rules", metavar="FILE", action="append", default=[], help="a rule file")
    made.add_argument("--interval", type=_duration, default="15s", help="between scrapes")
    made.set_defaults(document=_config)


def call(options: argparse.Namespace) -> int:
    """Prints the document, or writes it."""
    import yaml

    text = yaml.safe_dump(options.document(options), sort_keys=False, width=1000)
    write(text, options.output)
    return 0


def _rules(options: argparse.Namespace) -> dict[str, Any]:
    chosen = {field.name: getattr(options, field.name) for field in fields(rules.Thresholds)}
    return rules.document(rules.Thresholds(**chosen))


def _config(options: argparse.Namespace) -> dict[str, Any]:
    if not options.sd and not options.target:
        raise ExportError(
            "nothing to scrape",
            "Name a job's --sd http://node0:9417/sd, or each --target HOST:PORT.",
        )
    return config.document(
        options.sd,
        options.target,
        token_file=options.token_file,
        interval=options.interval,
        rules=options.rules,
    )


def _share(text: str) -> float:
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no ratio: 0 to 1")
    return value


def _duration(text: str) -> str:
    if not _DURATION.fullmatch(text):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: 30s, 5m, 1h30m")
    return text

"""A scrape configuration, and where the package has Grafana's dashboards.

It says no more than Prometheus and VictoriaMetrics both understand: the latter refuses what it does not
know, as the refresh interval of service discovery, or where rules are.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

BOARDS = sorted((Path(__file__).parent / "boards").glob("*.json"))
LABELS = (("__meta_zeromon_node", "node"),)
"""What service discovery says -> the label that every series of a target gets."""


def document(
    sd: Sequence[str],
    targets: Sequence[str],
    *,
    token_file: str,
    interval: str = "15s",
    rules: Sequence[str] = (),
) -> dict[str, Any]:
    """The file: one job that scrapes what the URLs *sd* list, and *targets*."""
    access = {"authorization": {"credentials_file": token_file}}
    job: dict[str, Any] = {"job_name": "zeromon", "honor_labels": True, **access}
    if sd:
        job["http_sd_configs"] = [{"url": url, **access} for url in sd]
        job["relabel_configs"] = [
            {"source_labels": [meta], "regex": "(.+)", "target_label": label}
            for meta, label in LABELS
        ]
    if targets:
        job["static_configs"] = [{"targets": list(targets)}]
    found: dict[str, Any] = {"global": {"scrape_interval": interval}}
    if rules:
        found["global"]["evaluation_interval"] = interval
        found["rule_files"] = list(rules)
    return found | {"scrape_configs": [job]}

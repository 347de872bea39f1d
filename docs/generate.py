"""Writes the parts of the documentation that the code defines: ``python docs/generate.py``.

``docs/metrics.md`` gets the table of metrics from :data:`zeromon.export.prometheus.metrics.METRICS`,
``docs/rules.md`` the table of rules from their pages. ``tests/docs/test_generated.py`` fails when either
differs from what this program would write.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from zeromon.diagnosis.rule import Page, all_pages
from zeromon.export.prometheus.metrics import METRICS

DOCS = Path(__file__).resolve().parent
BEGIN = "<!-- begin: docs/generate.py writes this table -->\n"
END = "<!-- end -->\n"
FOLDER = "../zeromon/diagnosis/rules"
RULES_HEAD = """\
# Rules

A finding has the code of its rule. `zeromon rule CODE` prints the page of a rule: why it matters, what
to change, what that costs, and the sources. Codes of the 100s come from `zeromon check` before the run,
the others from a run, or from both. `docs/generate.py` writes this page.
"""
FAMILIES = {
    "0": "The run and zeromon itself",
    "1": "Configuration files",
    "2": "Memory",
    "3": "Communication",
    "4": "Precision",
    "5": "Offload",
    "6": "Data and batches",
    "7": "Checkpoints",
}
"""The first digit of a rule's code, and what its rules are about."""


def metrics_table() -> str:
    """One row a metric: name, type, unit, labels besides run and rank, meaning."""
    rows = ["| metric | type | unit | labels | meaning |", "|---|---|---|---|---|"]
    for spec in METRICS:
        labels = ", ".join(spec.labels) or "-"
        cells = (f"`{spec.name}`", spec.kind, spec.unit or "-", labels, spec.help)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def metrics_page(text: str) -> str:
    """*text* of docs/metrics.md with the present table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{metrics_table()}\n{END}{after}"


def rules_page() -> str:
    """docs/rules.md: every rule by family, with the first sentence of its page."""
    parts = [RULES_HEAD]

    def family(page: Page) -> str:
        return page.code[2]

    for digit, group in groupby(all_pages().values(), key=family):
        rows = "\n".join(
            f"| [{page.code}]({FOLDER}/{page.code}.md) | {page.name} | {page.summary} |"
            for page in group
        )
        parts.append(f"## {FAMILIES[digit]}\n\n| code | name | finding |\n|---|---|---|\n{rows}\n")
    return "\n".join(parts)


def main() -> None:
    """Writes both pages."""
    page = DOCS / "metrics.md"
    page.write_text(metrics_page(page.read_text()))
    (DOCS / "rules.md").write_text(rules_page())


if __name__ == "__main__":
    main()

"""Writes the parts of the documentation that the code defines: ``python docs/generate.py``.

``docs/metrics.md`` gets the table of metrics from :data:`zeromon.export.prometheus.metrics.METRICS`,
``docs/rules.md`` the table of rules from their pages, ``docs/preflight.md`` that of devices from
:data:`zeromon.memory.speeds.DEVICES`. ``tests/docs/test_generated.py`` fails when either
differs from what this program would write.
"""

from __future__ import annotations

from itertools import groupby
from pathlib import Path

from zeromon.diagnosis.rule import Page, all_pages
from zeromon.export.prometheus.metrics import METRICS
from zeromon.memory.speeds import DEVICES

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


NVIDIA = "https://www.nvidia.com/en-us/data-center/"
SOURCES = {
    "a100-40": f"{NVIDIA}a100/", "a100": f"{NVIDIA}a100/", "a100-80": f"{NVIDIA}a100/",
    "h100": f"{NVIDIA}h100/", "h200": f"{NVIDIA}h200/", "b200": f"{NVIDIA}dgx-b200/",
    "l4": f"{NVIDIA}l4/", "l40s": f"{NVIDIA}l40s/", "a10": f"{NVIDIA}products/a10-gpu/",
    "v100": f"{NVIDIA}v100/", "v100-16": f"{NVIDIA}v100/", "t4": f"{NVIDIA}tesla-t4/",
    "rtx4090": "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf",
    "rtx3090": "https://www.nvidia.com/content/PDF/nvidia-ampere-ga-102-gpu-architecture-whitepaper-v2.pdf",
    "mi300x": "https://www.amd.com/en/products/accelerators/instinct/mi300/mi300x.html",
}  # fmt: skip
"""Device -> the vendor's page or paper with its peaks."""


def devices_table() -> str:
    """One row a device: its memory and its peaks, without those of sparse matrices."""
    head = ("`--gpu`", "memory, GiB", "bf16, TFLOP/s", "fp32, TFLOP/s", "memory, GB/s")
    titles = (*head, "between devices, GB/s", "host, GB/s", "peaks by")
    rows = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for name, peaks in DEVICES.items():
        rates = (peaks.half_flops / 1e12, peaks.single_flops / 1e12)
        bytes_per_second = (peaks.memory / 1e9, peaks.link / 1e9, peaks.host / 1e9)
        numbers = (peaks.nbytes / (1 << 30), *rates, *bytes_per_second)
        cells = (f"`{name}`", *(f"{n:,.4g}" for n in numbers), f"[data sheet]({SOURCES[name]})")
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def page_with_table(page: str, table: str) -> str:
    """The *page* with the present *table*."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table}\n{END}{after}"


TABLES = {"metrics.md": metrics_table, "preflight.md": devices_table}
"""Pages with a table within them."""


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
    """Writes the pages."""
    for name, table in TABLES.items():
        page = DOCS / name
        page.write_text(page_with_table(page.read_text(), table()))
    (DOCS / "rules.md").write_text(rules_page())


if __name__ == "__main__":
    main()

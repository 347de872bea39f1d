"""Writes the parts of the documentation that the code defines: ``python docs/generate.py``.

In ``docs/reference``, ``metrics.md`` gets the table of metrics from
:data:`zeromon.export.prometheus.metrics.METRICS`, ``rules.md`` that of rules from their pages,
``devices.md`` that of devices from :data:`zeromon.memory.speeds.DEVICES`, ``cli.md`` every verb and
option from the parser of the command line; ``docs/evidence`` gets its tables from JSON.
``tests/docs/test_generated.py`` fails when one differs from what this program would write.
"""

from __future__ import annotations

import argparse
import re
import sys
import textwrap
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path

from zeromon.cli import VERBS, build_parser
from zeromon.diagnosis.rule import Page, all_pages
from zeromon.export.prometheus.metrics import METRICS
from zeromon.memory.speeds import DEVICES

DOCS = Path(__file__).resolve().parent
sys.path.append(str(DOCS.parent / "tools"))

from evidence_pages import write_pages  # noqa: E402

BEGIN = "<!-- begin: docs/generate.py writes this table -->\n"
END = "<!-- end -->\n"
FOLDER = "../../zeromon/diagnosis/rules"
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


TABLES = {"reference/metrics.md": metrics_table, "reference/devices.md": devices_table}
"""Pages with a table within them."""


def rules_page() -> str:
    """docs/reference/rules.md: every rule by family, with the first sentence of its page."""
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


# ---- docs/reference/cli.md ------------------------------------------------------------------------

CLI_HEAD = """\
# Command line

Every verb with its options, defaults and exit codes, and every environment variable that zeromon reads.
`docs/generate.py` writes this page from the parser; `zeromon VERB --help` prints the same.

`zeromon --completion bash` (`zsh`, `fish`) prints a completion script, `zeromon --version` the version.

## Exit codes

| code | meaning |
|---|---|
| 0 | success |
| 1 | findings: the verb found what it looks for; its section has the details |
| 2 | wrong usage, or an error with a hint |
| 130 | ended by Ctrl-C |

`zeromon run` has the exit code of your command.
"""
SET_BY_USERS = {
    "ZEROMON_ADVERTISE": "address under which other nodes reach this node's collector",
    "ZEROMON_COLLECTOR": "`off`: agents start no collector",
    "ZEROMON_DIR": "folder of live records; default `/dev/shm/zeromon-UID`, or a temporary one",
    "ZEROMON_HOST": "address that the collector listens on; default `127.0.0.1`",
    "ZEROMON_NOTIFY": "URLs as for `run --notify`, with commas or spaces between them",
    "ZEROMON_OOM_SNAPSHOT": "folder for a memory snapshot of torch at an out-of-memory on a GPU",
    "ZEROMON_PORT": "port of the collector; default 9417, or the next free one",
    "ZEROMON_PROMETHEUS": "server that `attach`, `dash` and `report` read from",
    "ZEROMON_PROMETHEUS_TENANT": "tenant of Mimir, sent as `X-Scope-OrgID`",
    "ZEROMON_PROMETHEUS_TOKEN": "bearer token for that server",
    "ZEROMON_PURE": "`1`: the hooks are those in Python, not the compiled ones",
    "ZEROMON_RUN": "name of the run",
    "ZEROMON_SD_FILE": "file with the list of all collectors, for Prometheus's file_sd",
    "ZEROMON_STORE": "folder of records of ended runs; default `~/.local/state/zeromon`",
    "ZEROMON_THEME": "theme of the terminal view",
    "ZEROMON_TOKEN": "token of the collectors; the same on all nodes of a job",
    "ZEROMON_TOKEN_FILE": "file with that token",
}
SET_BY_ZEROMON = {
    "VGPU_ARITHMETIC": "kernels of virtual devices compute their values",
    "VGPU_LIBRARIES": "folder of the libraries of virtual devices",
    "VGPU_PLACES": "rank and node of each process of a preflight",
    "VGPU_RANKS": "ranks that run; the others are simulated",
    "ZEROMON_AGENTS": "folder of the package `zeromon_agents`",
    "ZEROMON_CORE": "folder of the package `zeromon`",
    "ZEROMON_PYTHON": "Python that runs the collector",
    "ZEROMON_RUN_DIR": "folder of the live run",
    "ZEROMON_SHIM": "`1`: start the agent in this process",
}
SET_BY_OTHERS = {
    "DISPLAY": "`dash` opens a browser where it is set",
    "HF_HOME": "cache of Hugging Face, for models of a preflight",
    "JPY_PARENT_PID, MPLBACKEND": "a notebook runs this process",
    "LD_LIBRARY_PATH, PYTHONPATH": "passed on, with zeromon's own folders",
    "LOCAL_SIZE, LOCAL_WORLD_SIZE, MASTER_ADDR, RANK, WORLD_SIZE": "place of a rank, by the launcher",
    "MLFLOW_TRACKING_URI": "server of the script's MLflow run",
    "NCCL_INSPECTOR_DUMP_DIR, NCCL_INSPECTOR_ENABLE, NCCL_INSPECTOR_PROM_DUMP": "where NCCL Inspector "
    "writes, read from the ranks",
    "NCCL_RAS_ADDR, NCCL_RAS_ENABLE": "where NCCL's RAS answers, read from the ranks",
    "NO_COLOR, TERM": "no colour with `NO_COLOR`, or with `TERM=dumb`",
    "SLURM_JOBID, SLURM_JOB_ID, SLURM_JOB_NODELIST, SLURM_LOCALID, SLURM_NTASKS, "
    "SLURM_NTASKS_PER_NODE, SLURM_PROCID, SLURM_STEP_ID": "job, step, ranks and nodes under Slurm",
    "TORCHELASTIC_RESTART_COUNT, TORCHELASTIC_RUN_ID, TORCHELASTIC_USE_AGENT_STORE": "job and attempt "
    "under torchrun",
    "TORCH_EXTENSIONS_DIR": "cache whose stale locks `doctor` lists",
    "WANDB_SERVICE": "left out of the process that streams to W&B",
    "XDG_CACHE_HOME, XDG_STATE_HOME": "parents of caches and records",
}
PACKAGES = ("zeromon", "agents", "dashboard")
_OWN_VARIABLE = re.compile(r"\bZEROMON_[A-Z_]*[A-Z]\b")
_READ_VARIABLE = re.compile(
    r'\b(?:os\.environ|environment|variables)(?:\.get\(|\.pop\(|\[)"([A-Z_]+)"'
    r'|"([A-Z_]+)" in os\.environ|"(SLURM_[A-Z_]+)"'
)
_OF_A_LAUNCH_COMMAND = ("zeromon/check/", "zeromon/diagnosis/")
"""Modules that read the environment of a file or of a snapshot, and not their own."""


def variables_read() -> set[str]:
    """Names of all environment variables that the product reads."""
    names: set[str] = set()
    root = DOCS.parent
    for file in (file for package in PACKAGES for file in (root / package).rglob("*.py")):
        text = file.read_text()
        names.update(_OWN_VARIABLE.findall(text))
        if not str(file.relative_to(root)).startswith(_OF_A_LAUNCH_COMMAND):
            names.update(name for found in _READ_VARIABLE.findall(text) for name in found if name)
    return names


def _table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    """A table of Markdown."""
    escaped = [" | ".join(cell.replace("|", "\\|") for cell in row) for row in rows]
    lines = (f"| {' | '.join(head)} |", f"|{'---|' * len(head)}", *(f"| {row} |" for row in escaped))
    return "\n".join(lines) + "\n"


def _escape(prose: str) -> str:
    """The *prose* with a backslash before each character outside of code that would be markup."""
    return re.sub(r"(`[^`]*`)|([<*])", lambda at: at[1] or f"\\{at[2]}", prose)


def _described(text: str) -> str:
    """Prose as paragraphs, indented rows as blocks of text."""
    parts = []
    for is_block, rows in groupby(text.strip("\n").split("\n"), lambda row: row.startswith(" ")):
        content = textwrap.dedent("\n".join(rows)).strip("\n")
        parts.append(f"\n```text\n{content}\n```\n" if is_block else _escape(content))
    return re.sub(r"\n{3,}", "\n\n", "\n".join(parts)).strip("\n")


def _option_rows(parser: argparse.ArgumentParser) -> Iterator[tuple[str, str, str]]:
    """Name, default and meaning of each argument of *parser*."""
    for action in parser._actions:
        if isinstance(action, (argparse._HelpAction, argparse._SubParsersAction)):
            continue
        value = action.metavar or (action.dest.upper() if action.nargs != 0 else "")
        if action.choices and not action.metavar:
            value = "{" + ",".join(map(str, action.choices)) + "}"
        names = ", ".join(action.option_strings)
        name = f"{names} {value}".strip() if names else str(value)
        meaning = action.help % {**vars(action), "prog": parser.prog} if action.help else ""
        if noted := re.search(r" \(default:? ([^)]*)\)", meaning):
            default, meaning = noted[1], meaning.replace(noted[0], "")
        else:
            is_set = action.default not in (None, False, "", [], argparse.SUPPRESS)
            default = str(action.default) if is_set else "-"
        yield f"`{name}`", default, _escape(meaning)


def _verb_parts(parser: argparse.ArgumentParser, level: int) -> Iterator[str]:
    """The section of a verb, and those of its actions."""
    yield f"{'#' * level} {parser.prog}\n"
    if parser.description:
        yield _described(parser.description) + "\n"
    if rows := list(_option_rows(parser)):
        yield _table(("argument", "default", "meaning"), rows)
    if parser.epilog:
        yield _described(parser.epilog) + "\n"
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for child in action.choices.values():
                yield from _verb_parts(child, level + 1)


def cli_page() -> str:
    """docs/reference/cli.md: verbs, options, defaults, exit codes, environment variables."""
    verbs = next(
        action for action in build_parser()._actions if isinstance(action, argparse._SubParsersAction)
    )
    parts = [CLI_HEAD]
    for verb in VERBS:
        parts += _verb_parts(verbs.choices[verb], 2)
    parts.append("## Environment variables\n")
    tables = {"Set by you": SET_BY_USERS, "Set by zeromon, for its own processes": SET_BY_ZEROMON,
              "Set by others, and read": SET_BY_OTHERS}  # fmt: skip
    listed = {name for table in tables.values() for names in table for name in names.split(", ")}
    if difference := listed ^ variables_read():
        raise SystemExit(
            f"environment variables without a row, or without a reader: {sorted(difference)}"
        )
    for title, table in tables.items():
        rows = [
            (", ".join(f"`{name}`" for name in names.split(", ")), text) for names, text in table.items()
        ]
        parts.append(f"### {title}\n\n{_table(('variable', 'meaning'), rows)}")
    return "\n".join(parts)


def main() -> None:
    """Writes the pages."""
    for name, table in TABLES.items():
        page = DOCS / name
        page.write_text(page_with_table(page.read_text(), table()))
    (DOCS / "reference" / "rules.md").write_text(rules_page())
    (DOCS / "reference" / "cli.md").write_text(cli_page())
    write_pages()


if __name__ == "__main__":
    main()

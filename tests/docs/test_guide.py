"""Guide and findings: every command parses or runs, every rule exists, every figure is plan's."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest

from zeromon.cli import build_parser, main
from zeromon.diagnosis.rule import all_pages

ROOT = Path(__file__).resolve().parents[2]
NAMES = ("how-to/before-the-run.md", "how-to/fix-a-run.md", "explanation/findings.md")
PAGES = [ROOT / "docs" / name for name in NAMES]
COMMANDS = sorted(
    {
        line
        for page in PAGES
        for block in re.findall(r"```console\n(.*?)```", page.read_text(), re.DOTALL)
        for line in block.splitlines()
        if line.startswith("zeromon ")
    }
)
PURE = ("plan", "check", "rule")
"""Verbs that need no run."""
GB, GIB = 1e9, 1 << 30


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_is_one(
    command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those without a run are carried out, the others parsed."""
    monkeypatch.chdir(ROOT)
    verb, *words = shlex.split(command, comments=True)[1:]
    if verb in PURE and "RUN" not in words:
        assert main([verb, *words]) in (0, 1)
        assert capsys.readouterr().out
    else:
        build_parser(verb).parse_args([verb, *words])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_rule_that_a_page_names_exists(page: Path) -> None:
    assert set(re.findall(r"ZM\d{3}", page.read_text())) <= all_pages().keys()


def plan(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, dict[str, Any]]:
    main(["plan", *arguments, "--json"])
    return {row["label"]: row for row in json.loads(capsys.readouterr().out)["rows"]}


TABLE_1 = {
    "7.5B": {
        "1": (120, 120, 120), "4": (52.5, 41.3, 30), "16": (35.6, 21.6, 7.5),
        "64": (31.4, 16.6, 1.88), "256": (30.4, 15.4, 0.47), "1024": (30.1, 15.1, 0.12),
    },
    "128B": {
        "1": (2048, 2048, 2048), "4": (896, 704, 512), "16": (608, 368, 128),
        "64": (536, 284, 32), "256": (518, 263, 8), "1024": (513, 257, 2),
    },
    "1T": {
        "1": (16000, 16000, 16000), "4": (7000, 5500, 4000), "16": (4750, 2875, 1000),
        "64": (4187, 2218, 250), "256": (4046, 2054, 62.5), "1024": (4011, 2013, 15.6),
    },
}  # fmt: skip
"""Rajbhandari et al. 2020, table 1: GB a device of stages 1, 2 and 3, by parameters and ranks."""


@pytest.mark.parametrize(
    ("model", "ranks"), [(model, ranks) for model, rows in TABLE_1.items() for ranks in rows]
)
def test_plan_has_the_papers_table(model: str, ranks: str, capsys: pytest.CaptureFixture[str]) -> None:
    """In GB and in GiB; the framework's bytes are the plain ones and its named additions."""
    rows = plan(capsys, model, "--devices", ranks)
    for stage, gigabytes in enumerate(TABLE_1[model][ranks], 1):
        found = rows[f"ZeRO-{stage}"]
        assert found["plain_bytes"] / GB == pytest.approx(gigabytes, rel=0.01, abs=0.01)
        assert found["plain_bytes"] / GIB == pytest.approx(gigabytes * GB / GIB, rel=0.01, abs=0.01)
        # a bucket of 5e8 elements, and what an element of the partition takes in the step
        added = 1.1 * GB + float(model[:-1]) * {"B": 1e9, "T": 1e12}[model[-1]] / int(ranks) * 8
        assert found["plain_bytes"] <= found["bytes"]["device"] <= found["plain_bytes"] + added


def test_the_table_has_one_unit(capsys: pytest.CaptureFixture[str]) -> None:
    """The paper's 38.5 GB stand as GiB beside those of the allocator."""
    main(["plan", "7B", "--devices", "4"])
    text = capsys.readouterr().out
    [row] = [line for line in text.splitlines() if line[4:].startswith("ZeRO-2  ")]
    assert "35.9 GiB" in row and " GB" not in row  # 2 + 14 / 4 bytes a parameter
    assert "45.6 GiB" in row  # the same, and six bytes an element of the partition in the step


def test_the_figures_of_the_myths(capsys: pytest.CaptureFixture[str]) -> None:
    four, eight = plan(capsys, "7B", "--devices", "4"), plan(capsys, "7B", "--devices", "8")
    whole = four["ZeRO-0"]["plain_bytes"]
    assert whole / GB == 112
    saved = [1 - rows["ZeRO-2"]["plain_bytes"] / whole for rows in (four, eight)]
    assert saved == pytest.approx([0.656, 0.766], abs=0.001)
    one, two = (whole / four[f"ZeRO-{stage}"]["plain_bytes"] for stage in (1, 2))
    assert (one, two) == pytest.approx((2.3, 2.9), abs=0.05)
    sharded = plan(capsys, "7B", "--devices", "4", "--framework", "fsdp2")["FSDP2 (ZeRO-2)"]
    assert sharded["plain_bytes"] / GB == pytest.approx(28)
    assert sharded["device_bytes_by_phase"]["loss"] / GB == pytest.approx(38.5)
    roles = four["ZeRO-1"]["roles"]["device"]
    assert roles["reduce_scatter"] == pytest.approx(5e8 * 2)
    sent = [four[f"ZeRO-{stage}"]["communication_bytes"] for stage in range(4)]
    assert [n / sent[0] for n in sent] == pytest.approx([1, 1.5, 1.5, 1.5 - 0.25 / 7])
    paper = [four[f"ZeRO-{stage}"]["paper_communication_bytes"] for stage in range(4)]
    assert [n / paper[0] for n in paper] == pytest.approx([1, 1, 1, 1.5])


def test_disk_bytes_of_the_myths(capsys: pytest.CaptureFixture[str]) -> None:
    """18 bytes a parameter, less 10^9 parameters of each rank that stay on the host."""
    options = ("16B", "--devices", "4", "--offload-optimizer", "nvme", "--offload-params", "nvme")
    found = plan(capsys, *options)["ZeRO-3 + optimizer on nvme + parameters on nvme"]
    assert found["bytes"]["nvme"] == pytest.approx(16e9 / 4 * 18 - 2 * 1e9)

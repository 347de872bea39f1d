"""docs/evidence/memory.md: what `zeromon plan` says of published runs, computed anew."""

from __future__ import annotations

import json
import re
import shlex
from pathlib import Path

import pytest
from hub_models import describe_in_this_process
from published_figures import GIB, MODELS, PublishedRun, page_rows

from zeromon.cli import main


def test_the_page_has_the_figures_of_many_runs() -> None:
    assert len(page_rows()) >= 40
    assert sum("GiB" in row.reported for row in page_rows()) >= 8


@pytest.mark.parametrize("run", page_rows())
def test_plan_says_what_others_have_measured(
    run: PublishedRun,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("transformers")
    path = tmp_path / "config.json"
    path.write_text(json.dumps(MODELS[run.model]))
    describe_in_this_process(monkeypatch)
    main(["plan", str(path), *shlex.split(run.options), "--json"])
    planned = json.loads(capsys.readouterr().out)
    row = next(row for row in planned["rows"] if row["given"])
    device_gib, usable_gib = row["bytes"]["device"] / GIB, planned["usable_bytes"] / GIB
    assert run.planned.startswith(f"{device_gib:.1f} of {usable_gib:.1f} GiB, ")
    assert row["fits"] is not run.reported.startswith("OOM")
    if figure := re.search(r"([\d.]+) GiB", run.reported):
        assert device_gib == pytest.approx(float(figure[1]), rel=0.05)

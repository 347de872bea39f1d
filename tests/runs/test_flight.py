"""Dumps of real runs that hang, or whose ranks call different things, beside torch's own analyzer."""

from __future__ import annotations

import json
import os
import pickle
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support import LAUNCH, PROGRAMS, clean_environment

from zeromon.cli import main

pytestmark = pytest.mark.long
FAULTS = ("sleep", "op", "short", "types", "groups")
KINDS = {
    "COLLECTIVE_TYPE_MISMATCH": "mismatched operations", "SIZE_OR_SYNTAX_MISMATCH": "mismatched sizes",
    "COLLECTIVE_DTYPE_MISMATCH": "mismatched element types",
}  # fmt: skip


@pytest.fixture(scope="module")
def dumps(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder a fault with the dumps of two ranks on gloo, eighteen seconds after their start."""
    folder = tmp_path_factory.mktemp("flight")
    running = []
    for fault in FAULTS:
        (folder / fault / "json").mkdir(parents=True)
        environment = clean_environment() | {
            "FLIGHT": str(folder / fault), "FAULT_AT": str(folder / f"{fault}.at"),
            "PATH": os.environ["PATH"],
        }  # fmt: skip
        command = [*LAUNCH, "2", str(PROGRAMS / "faults.py"), "ddp", fault]
        quiet: dict[str, Any] = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
        running.append(subprocess.Popen(command, env=environment, **quiet))
    for process in running:
        process.wait(120)
    yield folder


def theirs(folder: Path, whole: Path) -> list[tuple[str, int]]:
    """What torch's analyzer says: (kind, number), in its order.

    gloo does not write the members of its groups, without which the analyzer ends with a KeyError:
    they are added to *whole*.
    """
    whole.mkdir()
    for path in folder.glob("nccl_trace_rank_*"):
        content = pickle.loads(path.read_bytes())
        groups = {tuple(entry["process_group"]) for entry in content["entries"]}
        content["pg_config"] = {
            name: {"name": name, "desc": text, "ranks": "[0, 1]"} for name, text in groups
        }
        (whole / path.name).write_bytes(pickle.dumps(content, 2))
    module = "torch.distributed.flight_recorder.fr_trace"
    command = [sys.executable, "-m", module, str(whole), "-p", "nccl_trace_rank_"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    text = done.stdout + done.stderr
    found = [
        ("a member has not come", int(number))
        for number in re.findall(r"Not all ranks joining collective, sequence number: (\d+)", text)
    ]
    errors = re.findall(r"sequence number: (\d+) has errors.*?Error type: (\w+)", text, re.DOTALL)
    return [(KINDS[kind], int(number)) for number, kind in errors] or found


@pytest.mark.parametrize("fault", FAULTS)
def test_the_verdict_is_that_of_torch(
    dumps: Path, tmp_path: Path, fault: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "flight", str(dumps / fault), "--json"]) == 1
    found = json.loads(capsys.readouterr().out)["findings"]
    ours = [(one["kind"], one["sequence"]) for one in found]
    expected = theirs(dumps / fault, tmp_path / "whole")
    if fault == "groups":  # torch's has no word for it: to it both members have not come
        assert [kind for kind, _ in ours] == ["deadlock of groups"] * 2
        assert sorted(number for _, number in ours) == sorted(number for _, number in expected)
    else:
        assert ours == expected[:1]
    own = [row["call"]["stack"] for row in found[0]["ranks"] if row["state"] != "has not called it"]
    assert all("faults.py" in " ".join(stack) for stack in own)
    # the JSON of the same has no stacks, and the same verdict
    assert main(["trace", "flight", str(dumps / fault / "json"), "--json"]) == 1
    again = json.loads(capsys.readouterr().out)["findings"]
    assert [(one["kind"], one["sequence"]) for one in again] == ours


def test_the_missing_rank_and_its_last_call_are_named(
    dumps: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["trace", "flight", str(dumps / "sleep")]) == 1
    text = capsys.readouterr().out
    assert "a member has not come" in text
    assert re.search(r"^  1 +has not called it +last all_reduce #\d+ ", text, re.MULTILINE)
    assert re.search(r"^  0 +waiting \(scheduled\) .*faults\.py:\d+", text, re.MULTILINE)

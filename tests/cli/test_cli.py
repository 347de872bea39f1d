"""The command line: help that teaches, clear errors, JSON, exit codes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from builders import rank, run
from command_line import zeromon

from zeromon.cli import main
from zeromon.diagnosis.engine import advise
from zeromon.storage.run_store import Store


def test_help_lists_every_verb_and_an_example(tmp_path: Path) -> None:
    """And each verb explains itself."""
    top = zeromon(tmp_path, "--help")
    assert top.returncode == 0
    assert "zeromon run -- torchrun" in top.stdout
    for verb in ("run", "attach", "report", "compare", "export"):
        assert f"\n  {verb} " in top.stdout
        page = zeromon(tmp_path, verb, "--help")
        assert page.returncode == 0
        assert len(page.stdout.splitlines()) > 8


@pytest.mark.parametrize(
    ("words", "text"),
    [
        (["report"], "no run has been recorded yet"),
        (["report", "nope"], "no run has been recorded yet"),
        (["attach"], "no run is live on this node"),
        (["attach", "127.0.0.1:1"], "no collector answers at 127.0.0.1:1"),
        (["run"], "no command to run"),
        (["run", "--name", "../evil", "--", "true"], "cannot name a run"),
        (["run", "--port", "99999", "--", "true"], "99999 is not a port"),
    ],
)
def test_errors_are_two_lines_with_a_way_out(tmp_path: Path, words: list[str], text: str) -> None:
    """Exit code 2, nothing on stdout, no traceback."""
    done = zeromon(tmp_path, *words)
    assert done.returncode == 2
    assert done.stdout == ""
    assert text in done.stderr
    assert len(done.stderr.strip().splitlines()) == 2
    assert "Traceback" not in done.stderr


def test_usage_errors_are_two(tmp_path: Path) -> None:
    """As argparse has it."""
    assert zeromon(tmp_path, "fly").returncode == 2


def test_report_prints_the_newest_run_and_says_whether_there_are_findings(tmp_path: Path) -> None:
    """0 without, 1 with; --json is the same snapshot."""
    store = Store(tmp_path / "store")
    fine = run(rank(0, exposed_ratio=0.01, overlap_ratio=0.9), run="fine", ended=True)
    store.save(fine)
    done = zeromon(tmp_path, "report")
    assert (done.returncode, done.stderr) == (0, "")
    assert "run fine: finished after 20 steps" in done.stdout
    bad = run(rank(0, failed=True, ended="SIGKILL", alive=False), run="bad", ended=True)
    store.save(run(*bad.ranks, run="bad", ended=True, findings=advise(bad), started_wall=2000.0))
    done = zeromon(tmp_path, "report", "--json")
    assert done.returncode == 1
    content = json.loads(done.stdout)
    assert (content["run"], content["ranks"][0]["status"]["ended"]) == ("bad", "SIGKILL")


def test_a_record_that_was_cut_short_is_a_clear_error(tmp_path: Path) -> None:
    """Not a traceback."""
    store = Store(tmp_path / "store")
    store.save(run(rank(0), run="cut"))
    path = tmp_path / "store" / "runs" / "cut" / "snapshot.json"
    path.write_bytes(path.read_bytes()[:100])
    done = zeromon(tmp_path, "report")
    assert done.returncode == 2
    assert "not a run snapshot" in done.stderr


def test_a_closed_pipe_is_no_error(tmp_path: Path) -> None:
    """`zeromon report | head -1`."""
    Store(tmp_path / "store").save(run(*(rank(n) for n in range(30)), run="many", ended=True))
    command = f"{sys.executable} -m zeromon report --json | head -c 10"
    environment = os.environ | {
        "ZEROMON_DIR": str(tmp_path / "rings"),
        "ZEROMON_STORE": str(tmp_path / "store"),
    }
    done = subprocess.run(
        ["bash", "-c", command], env=environment, capture_output=True, text=True, check=False
    )
    assert done.stderr == ""
    assert len(done.stdout) == 10


@pytest.mark.parametrize("server", ["dash --no-browser", "mcp --http"])
@pytest.mark.parametrize(("port", "why"), [("99999", "0 to 65535"), ("-1", "0 to 65535"), ("x", "port")])
def test_a_port_that_is_none_is_no_port_in_use(
    server: str, port: str, why: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*server.split(), f"--port={port}"])
    assert ended.value.code == 2
    told = capsys.readouterr().err
    assert why in told and "in use" not in told


def test_the_dashboard_refuses_a_server_that_does_not_answer(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["dash", "--no-browser", "--prometheus", "http://127.0.0.1:1"]) == 2
    assert "no Prometheus answers at http://127.0.0.1:1" in capsys.readouterr().err

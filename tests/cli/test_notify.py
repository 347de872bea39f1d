"""`zeromon doctor --notify`, and what `zeromon run --notify` refuses before training starts."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from command_line import zeromon
from receivers import webhook
from support import free_port

SECRET = "s3cr3ts3cr3t"


def test_a_test_message_arrives(tmp_path: Path) -> None:
    with webhook() as server:
        url = f"json://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}"
        done = zeromon(tmp_path, "doctor", "--notify", ZEROMON_NOTIFY=url)
        assert [request.json["title"] for request in server.requests] == ["test: zeromon"]
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == "json://127.0.0.1 has accepted the message\n"


def test_a_server_that_is_not_there_is_said_without_the_secret(tmp_path: Path) -> None:
    url = f"json://user:{SECRET}@127.0.0.1:{free_port()}/{SECRET}"
    done = zeromon(tmp_path, "doctor", "--notify", url)
    assert done.returncode == 1
    told = "did not accept the message: no answer, or none that accepts it"
    assert done.stderr == f"zeromon: json://127.0.0.1 {told}\n"


@pytest.mark.parametrize("words", [[], [f"slakc://{SECRET}"]])
def test_what_names_no_service_is_refused(tmp_path: Path, words: list[str]) -> None:
    done = zeromon(tmp_path, "doctor", "--notify", *words)
    assert done.returncode == 2
    assert "URL" in done.stderr and SECRET not in done.stderr


@pytest.mark.parametrize("has_extra", [True, False])
def test_alerts_that_cannot_be_sent_are_refused_before_training(tmp_path: Path, has_extra: bool) -> None:
    (tmp_path / "apprise.py").write_text("raise ImportError(name='apprise')")
    path = os.environ.get("PYTHONPATH", "")
    path = path if has_extra else f"{tmp_path}{os.pathsep}{path}"
    program = f"open({str(tmp_path / 'trained')!r}, 'w')"
    words = ("run", "--notify", f"slakc://{SECRET}", "--", sys.executable, "-c", program)
    done = zeromon(tmp_path, *words, PYTHONPATH=path)
    assert done.returncode == 2
    assert ("zeromon[notify]" in done.stderr) is not has_extra
    assert SECRET not in done.stderr
    assert not (tmp_path / "trained").exists()

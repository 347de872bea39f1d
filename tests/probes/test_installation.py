"""Beside torch, or as a tool: the command for an extra, and the Python that has torch."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from zeromon.base.errors import package_install_hint
from zeromon.probes import process as installation


@pytest.mark.parametrize(
    ("file", "command"),
    [
        ("pyvenv.cfg", "pip install"),
        ("uv-receipt.toml", "uv tool install"),
        ("pipx_metadata.json", "pipx install --force"),
    ],
)
def test_an_extra_goes_where_zeromon_is(
    file: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / file).touch()
    monkeypatch.setattr(sys, "prefix", str(tmp_path))
    assert package_install_hint("mcp") == f"{command} 'zeromon[mcp]'"


def test_a_tool_asks_the_first_python_of_the_path(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert installation.find_training_python() == sys.executable
    monkeypatch.setattr(installation, "find_spec", lambda _: None)
    python = tmp_path / "python"
    python.touch(mode=0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert installation.find_training_python() == str(python)
    python.unlink()
    assert installation.find_training_python() == sys.executable

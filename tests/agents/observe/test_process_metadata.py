"""What the agent records of its process: variables without secrets, versions without imports."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch

from zeromon_agents.observe.process_metadata import package_versions, recorded_variables, script_folder


def test_no_secret_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    monkeypatch.setenv("TORCH_HUB_TOKEN", "hidden")
    monkeypatch.setenv("AWS_REGION", "elsewhere")
    monkeypatch.setenv("TRITON_CACHE_DIR", "x" * 5000)
    found = recorded_variables()
    assert found["NCCL_IB_HCA"] == "mlx5"
    assert not found.keys() & {"TORCH_HUB_TOKEN", "AWS_REGION"}
    assert len(found["TRITON_CACHE_DIR"]) == 200


def test_versions_are_of_what_is_loaded() -> None:
    assert package_versions()["torch"] == str(torch.__version__)
    code = (
        "import sys; from zeromon_agents.observe.process_metadata import package_versions;"
        "assert 'transformers' not in {**sys.modules, **package_versions()}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)


def test_a_blocked_import_has_no_version(monkeypatch: pytest.MonkeyPatch) -> None:
    """A script blocks a package by None in its place."""
    monkeypatch.setitem(sys.modules, "apex", None)
    versions = package_versions()
    assert "apex" not in versions and versions["torch"] == str(torch.__version__)


def test_the_folder_is_the_script_s(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.touch()
    monkeypatch.setattr(sys, "argv", [str(script), "--steps", "3"])
    assert script_folder() == str(tmp_path)
    monkeypatch.setattr(sys, "argv", ["-c"])
    assert script_folder() == str(Path.cwd())

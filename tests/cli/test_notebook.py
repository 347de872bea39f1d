"""The notebook of exercises, executed by Jupyter's own client."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from support import ROOT, clean_environment

EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""


@pytest.mark.long
def test_the_exercises_run_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    python = tmp_path / "jupyter" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "jupyter"], check=True)
    install = [python, "-m", "pip", "install", "--quiet", "nbclient", "nbformat", "ipykernel"]
    subprocess.run(install, check=True)
    environment = clean_environment() | {
        "ZEROMON_DIR": str(tmp_path / "rings"), "ZEROMON_STORE": str(tmp_path / "store"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    made = tmp_path / "made.ipynb"
    command = [python, "-c", EXECUTE, ROOT / "examples" / "exercises.ipynb", tmp_path, made]
    for name in ("train_gpt.py",):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    subprocess.run(command, check=True, env=environment, timeout=400)
    cells = [cell for cell in json.loads(made.read_text())["cells"] if cell["cell_type"] == "code"]
    texts = [json.dumps(cell["outputs"]) for cell in cells]
    assert "optimizer state" in texts[0] and "rest of RSS" in texts[0]
    assert "Recommended: stage" in texts[1] and "fsdp2-zero2" in texts[1]
    assert "checkpointing=yes" in texts[2]
    assert "/run/live/overview" in texts[3] and "Traceback" not in "".join(texts)

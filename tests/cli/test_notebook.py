"""The notebook of exercises, executed by Jupyter's own client."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
from support import ROOT, clean_environment

EXECUTE = """
import sys, nbformat, nbclient
notebook = nbformat.read(sys.argv[1], 4)
nbclient.NotebookClient(notebook, timeout=300, resources={"metadata": {"path": sys.argv[2]}}).execute()
nbformat.write(notebook, sys.argv[3])
"""
PICTURE = "application/vnd.plotly"
STYLE = re.compile("\x1b\\[[0-9;]*m")


@pytest.mark.long
def test_the_exercises_run_from_the_first_cell_to_the_last(tmp_path: Path) -> None:
    python = tmp_path / "jupyter" / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "jupyter"], check=True)
    packages = "nbclient", "nbformat", "ipykernel", "pandas"
    subprocess.run([python, "-m", "pip", "install", "--quiet", *packages], check=True)
    # As where zeromon is installed beside Jupyter: its packages behind those of the kernel
    (packages_of_kernel,) = (tmp_path / "jupyter" / "lib").glob("python*/site-packages")
    ours = sysconfig.get_path("purelib")
    (packages_of_kernel / "ours.pth").write_text(f"import site; site.addsitedir({ours!r})\n")
    environment = clean_environment() | {
        "ZEROMON_DIR": str(tmp_path / "rings"), "ZEROMON_STORE": str(tmp_path / "store"),
        "PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}",
    }  # fmt: skip
    made = tmp_path / "made.ipynb"
    command = [python, "-c", EXECUTE, ROOT / "examples" / "exercises.ipynb", tmp_path, made]
    for name in ("train_gpt.py",):
        (tmp_path / name).symlink_to(ROOT / "examples" / name)
    subprocess.run(command, check=True, env=environment, timeout=900)
    cells = [cell for cell in json.loads(made.read_text())["cells"] if cell["cell_type"] == "code"]
    by_source = {"".join(cell["source"]): cell["outputs"] for cell in cells}
    pictures = [source for source, outputs in by_source.items() if PICTURE in json.dumps(outputs)]
    assert [source.split("\n")[-1].partition(".")[2] for source in pictures] == [
        "roles()", "memory()", "exposed()", "changes()", 'load("live").exposed()',
    ]  # fmt: skip
    streams = [output for outputs in by_source.values() for output in outputs if "name" in output]
    assert {stream["name"] for stream in streams} == {"stdout"}  # a page shows the other one in red
    rows = STYLE.sub("", "".join("".join(stream["text"]) for stream in streams)).splitlines()
    progress = [row for row in rows if row.startswith(("zeromon: ", "  measured: "))]
    assert len(set(progress)) == len(progress) > 4 and not any("\r" in row for row in rows)
    assert max(map(len, rows)) <= 100 and not any(re.search("[\u2800-\u28ff]", row) for row in rows)
    fit, changes, compared, live = (
        json.dumps(next(outputs for source, outputs in by_source.items() if word in source))
        for word in ("zeromon fit", "plan --from", "zeromon.compare", "IFrame")
    )
    assert "Recommended: stage" in fit and "fsdp2-zero2" in fit
    assert "checkpointing=yes" in changes and "step time, median" in compared
    assert "/run/live/overview?token=" in live

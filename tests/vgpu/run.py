"""Python on the virtual device: ``run.py ARGUMENT...``, as ``python ARGUMENT...`` on eight H100s.

VGPU_DEVICE chooses another device, VGPU_TORCH a version of torch. The timeline stays where VGPU_DIR
says.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from vgpu.environment import DEFAULT, Missing, find  # noqa: E402
from zeromon_vgpu.machine import write_machine  # noqa: E402


def main(arguments: list[str]) -> int:
    """Runs Python with these arguments; its exit code, or 3 if the environment is not there."""
    try:
        environment = find(os.environ.get("VGPU_TORCH", DEFAULT))
    except Missing as reason:
        print(reason, file=sys.stderr)
        return 3
    with tempfile.TemporaryDirectory() as unnamed:
        folder = Path(os.environ.get("VGPU_DIR", unnamed))
        write_machine(folder, os.environ.get("VGPU_DEVICE", "h100"))
        variables = os.environ | environment.variables(folder)
        return subprocess.call([environment.python, *arguments], env=variables)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

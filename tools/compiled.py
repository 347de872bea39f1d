"""Compiles what the collector does with every record, which takes half of its time.

    python tools/compiled.py FOLDER

makes a copy of the package in FOLDER and compiles the modules below there; PYTHONPATH=FOLDER runs it.
With ZEROMON_COMPILE=1 the build of the wheel does the same (``tools/build_hook.py``). They are ordinary
Python, which mypyc reads by its types: nothing is written twice, and what is not compiled runs as it is.
It needs mypy, setuptools and a C compiler.
"""

from __future__ import annotations

import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copytree, ignore_patterns

NEEDS = ("mypy>=2.4", "setuptools>=65")
MODULES = (
    "zeromon/diagnosis/stragglers.py",
    "zeromon/fold/collectives.py",
    "zeromon/fold/collective_stats.py",
    "zeromon/fold/fold.py",
    "zeromon/fold/ledger.py",
    "zeromon/fold/summarize.py",
    "zeromon/fold/state.py",
    "zeromon/fold/steps.py",
    "zeromon/snapshot/communication.py",
    "zeromon/snapshot/intervals.py",
)
ROOT = Path(__file__).resolve().parents[1]


def compile_into(folder: Path) -> list[Path]:
    """Makes a compiled copy of the package in *folder*; returns its libraries, relative to it.

    Raises :class:`RuntimeError` with the compiler's words.
    """
    copytree(
        ROOT / "zeromon", folder / "zeromon", dirs_exist_ok=True,
        ignore=ignore_patterns("__pycache__", "*.so"),
    )  # fmt: skip
    done = subprocess.run(
        [sys.executable, __file__], cwd=folder, capture_output=True, text=True, check=False
    )
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    found = [path.relative_to(folder) for path in sorted(folder.rglob(f"*{suffix}"))]
    found = [path for path in found if path.parts[0] != "build"]
    if done.returncode or len(found) <= len(MODULES):
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return found


def _build() -> None:
    """Compiles the modules of the package in the working directory, in place."""
    from mypyc.build import mypycify
    from setuptools import setup

    # its imports are typed where the project is checked; here they may not be installed
    options = ["--ignore-missing-imports", "--follow-imports=silent"]
    setup(
        name="zeromon",
        packages=[],
        py_modules=[],
        ext_modules=mypycify([*options, *MODULES], opt_level="1", debug_level="0", group_name="zeromon"),
        script_args=["--quiet", "build_ext", "--inplace"],
    )


if __name__ == "__main__":
    if len(sys.argv) > 1:
        print(*compile_into(Path(sys.argv[1]).resolve()), sep="\n")
    else:
        _build()

"""Compiles what the collector does with every record, which takes half of its time.

    python tools/compiled.py FOLDER

makes a copy of the package in FOLDER and compiles the modules below there; PYTHONPATH=FOLDER runs it.
With ZEROMON_COMPILE=1 the build of the wheel does the same (``tools/build_hook.py``). They are ordinary
Python, which mypyc reads by its types: nothing is written twice, and what is not compiled runs as it is.
It needs mypy, setuptools and a C compiler. With ZEROMON_COMPILE=x86_64 or aarch64 the compiler is zig,
from PyPI, for that machine and the glibc of manylinux2014.
"""

from __future__ import annotations

import importlib.machinery
import os
import platform
import subprocess
import sys
import sysconfig
from pathlib import Path
from shutil import copytree, ignore_patterns

NEEDS = ("mypy>=2.4", "setuptools>=65")
CROSS = "ziglang>=0.13"
GLIBC = "2.17"
"""The oldest that a wheel of manylinux2014 may need (PEP 599)."""
MODULES = (
    "zeromon/diagnosis/stragglers.py",
    "zeromon/fold/collectives.py",
    "zeromon/fold/collective_stats.py",
    "zeromon/fold/fold.py",
    "zeromon/fold/ledger.py",
    "zeromon/fold/summarize.py",
    "zeromon/fold/state.py",
    "zeromon/fold/steps.py",
    "zeromon/snapshot/intervals.py",
)
ROOT = Path(__file__).resolve().parents[1]


def compile_into(folder: Path, machine: str = "") -> list[Path]:
    """Makes a compiled copy of the package in *folder*; returns its libraries, relative to it.

    *machine*: x86_64 or aarch64, whose libraries any Linux from glibc 2.17 on can load; "" is this one.
    Raises :class:`RuntimeError` with the compiler's words.
    """
    copytree(
        ROOT / "zeromon", folder / "zeromon", dirs_exist_ok=True,
        ignore=ignore_patterns("__pycache__", "*.so"),
    )  # fmt: skip
    suffix = sysconfig.get_config_var("EXT_SUFFIX")
    environment = dict(os.environ)
    if machine:
        suffix = suffix.replace(platform.machine(), machine)
        # A build without optimization would trap at what C leaves undefined
        zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
        environment["CC"] = f"{zig} -fno-sanitize=undefined"
    done = subprocess.run(
        [sys.executable, __file__, "--suffix", suffix],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [path.relative_to(folder) for path in sorted(folder.rglob(f"*{suffix}"))]
    found = [path for path in found if path.parts[0] != "build"]
    if done.returncode or len(found) <= len(MODULES):
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return found


def _build(suffix: str) -> None:
    """Compiles the modules of the package in the working directory, in place, as NAME*suffix*."""
    # mypyc writes the first into the modules, setuptools names their files by the second
    importlib.machinery.EXTENSION_SUFFIXES[0] = suffix
    sysconfig.get_config_vars()["EXT_SUFFIX"] = suffix
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
    if sys.argv[1] == "--suffix":
        _build(sys.argv[2])
    else:
        print(*compile_into(Path(sys.argv[1]).resolve()), sep="\n")

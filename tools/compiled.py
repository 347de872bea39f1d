"""Compiles what the collector does with every record, and the hot paths of the agent's hooks.

    python tools/compiled.py FOLDER
    python tools/compiled.py --hooks

makes a copy of the package in FOLDER and compiles the modules below there; PYTHONPATH=FOLDER runs it.
With ZEROMON_COMPILE=1 the build of the wheel does the same (``tools/build_hook.py``). They are ordinary
Python, which mypyc reads by its types: nothing is written twice, and what is not compiled runs as it is.
The hooks are a file of C beside the Python that stands in for it; ``--hooks`` compiles them in place.
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
HOOKS = Path("zeromon_agents/runtime/compiled_hooks.c")
X86_64 = ("x86_64", "amd64", "AMD64")
"""Where the order of a record's stores is that of the program: elsewhere records need a CRC."""


def compile_hooks(folder: Path, machine: str = "") -> list[Path]:
    """Compiles the hooks into *folder*; returns the library, relative to it, or [] on another machine.

    *machine* as for :func:`compile_into`. Raises :class:`RuntimeError` with the compiler's words.
    """
    if (machine or platform.machine()) not in X86_64:
        return []
    suffix, environment = _suffix_and_environment(machine)
    library = HOOKS.with_name(HOOKS.stem + suffix)
    (folder / library).parent.mkdir(parents=True, exist_ok=True)
    compiler = environment.get("CC") or sysconfig.get_config_var("CC") or "cc"
    flags = ["-O2", "-shared", "-fPIC", "-fno-strict-aliasing", "-I", sysconfig.get_paths()["include"]]
    try:
        done = subprocess.run(
            [*compiler.split(), *flags, ROOT / "agents" / HOOKS, "-o", folder / library],
            env=environment, capture_output=True, text=True, check=False,
        )  # fmt: skip
    except OSError as error:
        raise RuntimeError(str(error)) from None
    if done.returncode:
        raise RuntimeError(done.stderr[-4000:])
    return [library]


def _suffix_and_environment(machine: str) -> tuple[str, dict[str, str]]:
    """Returns how a library for *machine* is named, and the environment of its compiler."""
    suffix, environment = str(sysconfig.get_config_var("EXT_SUFFIX")), dict(os.environ)
    if machine:
        suffix = suffix.replace(platform.machine(), machine)
        # A build without optimization would trap at what C leaves undefined
        zig = f"{sys.executable} -m ziglang cc -target {machine}-linux-gnu.{GLIBC}"
        environment["CC"] = f"{zig} -fno-sanitize=undefined"
    return suffix, environment


def compile_into(folder: Path, machine: str = "") -> list[Path]:
    """Makes a compiled copy of the package in *folder*; returns its libraries, relative to it.

    *machine*: x86_64 or aarch64, whose libraries any Linux from glibc 2.17 on can load; "" is this one.
    Raises :class:`RuntimeError` with the compiler's words.
    """
    copytree(
        ROOT / "zeromon", folder / "zeromon", dirs_exist_ok=True,
        ignore=ignore_patterns("__pycache__", "*.so"),
    )  # fmt: skip
    suffix, environment = _suffix_and_environment(machine)
    done = subprocess.run(
        [sys.executable, __file__, "--suffix", suffix],
        cwd=folder, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    found = [path.relative_to(folder) for path in sorted(folder.rglob(f"*{suffix}"))]
    found = [path for path in found if path.parts[0] != "build"]
    if done.returncode or len(found) <= len(MODULES):
        raise RuntimeError((done.stdout + done.stderr)[-4000:])
    return found + compile_hooks(folder, machine)


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
    elif sys.argv[1] == "--hooks":
        compile_hooks(ROOT / "agents")
    else:
        print(*compile_into(Path(sys.argv[1]).resolve()), sep="\n")

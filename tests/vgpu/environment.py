"""``make vgpu``: an environment with the real CUDA build of torch and our libraries in NVIDIA's place.

``environment.py [--triton] [VERSION...]`` makes those of these versions of torch, by default 2.13.0:
1.2 GB each, and 0.7 GB with Triton.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
if __name__ == "__main__":
    sys.path.insert(0, str(ROOT / "tests"))

from zeromon.cli.virtual_machine import build_cached_libraries  # noqa: E402

HOME = Path(os.environ.get("VGPU_HOME", ROOT / "build" / "vgpu"))
"""Where the environments are."""
CACHE = HOME / "cache"
"""The cache of the tests' `zeromon preflight`, which finds the libraries of its environment there."""
DEFAULT, NEWEST = "2.13.0", "2.15.0"
CUDA_12 = "2.9.1"
"""A version whose wheel on PyPI is built with CUDA 12."""
STARTUP = (
    'import os; os.environ.get("VGPU_DIR")'
    ' and __import__("zeromon_vgpu.startup").startup.begin_at_startup()\n'
)
"""A line that each Python of the environment runs when it starts."""


class Missing(Exception):
    """The wheel, the compiler or the environment cannot be had here; the text says which."""


@dataclass(frozen=True)
class Environment:
    """A Python with a CUDA build of torch, and the libraries that stand in for NVIDIA's."""

    version: str

    @property
    def folder(self) -> Path:
        """Where it is."""
        return HOME / f"torch-{self.version}"

    @property
    def python(self) -> Path:
        """Its interpreter."""
        return self.folder / "bin" / "python"

    @property
    def site(self) -> Path:
        """Its packages."""
        return Path(sysconfig.get_path("purelib", "posix_prefix", {"base": str(self.folder)}))

    @property
    def libraries(self) -> Path:
        """The stand-ins that were built for its wheel, as `zeromon preflight` builds them."""
        name = re.sub(r"\W+", "-", str(self.site / "torch")).strip("-")
        return CACHE / "zeromon" / "vgpu" / name

    @property
    def has_triton(self) -> bool:
        """Whether Triton is there, which ``torch.compile`` needs."""
        return (self.site / "triton" / "__init__.py").exists()

    def variables(self, run: Path) -> dict[str, str]:
        """What a process needs to find the virtual machine of the run in that folder."""
        return {
            "VGPU_LIBRARIES": str(self.libraries),
            "LD_LIBRARY_PATH": str(self.libraries),  # for what runs without our start-up line
            "TRITON_LIBCUDA_PATH": str(self.libraries),  # which it asks ldconfig for otherwise
            "VGPU_DIR": str(run),
            "DS_IGNORE_CUDA_DETECTION": "1",
        }

    def make(self) -> Environment:
        """Installs the wheel and builds the libraries, unless both are there."""
        if shutil.which("g++") is None:
            raise Missing("no g++ to build the virtual device with (apt-get install g++)")
        if not (self.site / "torch" / "version.py").exists():
            self._install()
        self._add_project()
        with mock.patch.dict(os.environ, XDG_CACHE_HOME=str(CACHE)):
            built = build_cached_libraries(self.site / "torch")
        assert built == self.libraries, f"{built} is not {self.libraries}"
        return self

    def _install(self) -> None:
        venv.create(self.folder, with_pip=False, clear=True, symlinks=True)
        try:
            self._install_wheel(f"torch==={self.version}")
        except Missing:
            shutil.rmtree(self.folder)
            raise

    def _add_project(self) -> None:
        """Makes the project's packages, and what torch needs besides, importable."""
        paths = [sysconfig.get_path("purelib"), str(ROOT / "tests"), str(ROOT / "agents")]
        lines = "".join(f"import site; site.addsitedir({path!r})\n" for path in paths) + STARTUP
        file = self.site / "zz_project.pth"
        if not file.exists() or file.read_text() != lines:
            file.unlink(missing_ok=True)
            file.write_text(lines)

    def add_triton(self) -> Environment:
        """Installs the Triton that the wheel of torch names, for inductor, unless it is there."""
        if not self.has_triton:
            (torch,) = importlib.metadata.distributions(name="torch", path=[str(self.site)])
            pinned = re.search(r"^triton([=~]=[\w.]+)", "\n".join(torch.requires or []), re.MULTILINE)
            if pinned is None:
                raise Missing(f"torch {self.version} names no version of Triton")
            self._install_wheel(f"triton{pinned[1]}")
        return self

    def _install_wheel(self, wheel: str) -> None:
        # The index of PyPI alone: a build for CPUs of the same version, which a machine may prefer, is
        # not what is asked for. What torch depends on besides comes from the project's environment.
        settings = {"PIP_CONFIG_FILE": os.devnull, "PIP_FIND_LINKS": "", "PIP_EXTRA_INDEX_URL": ""}
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-compile"]
        command += ["--disable-pip-version-check", "--target", str(self.site), wheel]
        done = subprocess.run(command, env={**os.environ, **settings}, capture_output=True, text=True)
        if done.returncode:
            last = (done.stderr.strip() or "pip failed").splitlines()[-1]
            raise Missing(f"no {wheel} for CUDA: {last}")


def find(version: str = DEFAULT) -> Environment:
    """The environment that ``make vgpu`` has made for a version, its libraries brought up to date."""
    environment = Environment(version)
    if not (environment.site / "torch" / "version.py").exists():
        raise Missing(f"no virtual device for torch {version}: make vgpu")
    return environment.make()


def main() -> int:
    """Makes the environments; 3 if one cannot be had here."""
    parser = argparse.ArgumentParser(description="Make environments with the CUDA build of torch.")
    parser.add_argument("versions", nargs="*", default=[DEFAULT], metavar="VERSION")
    parser.add_argument("--triton", action="store_true", help="with Triton, for torch.compile: 0.7 GB")
    options = parser.parse_args()
    for version in options.versions:
        try:
            made = Environment(version).make()
            if options.triton:
                made.add_triton()
        except Missing as reason:
            print(reason, file=sys.stderr)
            return 3
        print(made.folder)
    return 0


if __name__ == "__main__":
    sys.exit(main())

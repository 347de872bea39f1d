"""C sources for functions that a torch wheel needs and that no stand-in models.

A generated function returns its library's "not supported" and names itself once on stderr. So a wheel
loads without NVIDIA's libraries, and a call that has no model is an error, never a wrong result.
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

NOT_SUPPORTED = {
    "cudart": 801, "cuda": 801, "nvidia-ml": 3, "nccl": 5, "cublas": 15, "cublasLt": 15, "cudnn": 3000,
    "cusolver": 9, "cusparse": 10, "cusparseLt": 10, "cufft": 16, "curand": 204, "cufile": 5,
    "nvrtc": 11, "cupti": 27,
}  # fmt: skip
"""The status of each library that says so; of others, 1."""

PREFIXES = {
    "cudart": r"(__)?cuda[A-Z]", "cuda": r"cu[A-Z](?!File)", "nccl": r"p?nccl",
    "cublas": r"cublas(?!Lt)", "cublasLt": r"cublasLt", "cudnn": r"cudnn", "cusolver": r"cusolver",
    "cusparse": r"cusparse(?!Lt)", "cusparseLt": r"cusparseLt", "cufft": r"cufft", "curand": r"curand",
    "cufile": r"cuFile", "nvrtc": r"nvrtc", "cupti": r"cupti", "nvshmem_host": r"nvshmem",
    "nvToolsExt": r"nvtx",
}  # fmt: skip
"""The beginnings of the names of a library's functions."""

LIBRARY = re.compile(r"NEEDED.*\[(lib((?:cu|nv|nccl)\w*)\.so[^\]]*)\]")

PRELUDE = """#include <stdio.h>
static int refuse(const char *name, int status, int *said) {
  if (!*said) fprintf(stderr, "vgpu: %s: has no model on the virtual device\\n", name);
  *said = 1;
  return status;
}
"""


@dataclass
class Needs:
    """The imports of the libraries of a wheel."""

    sonames: dict[str, str] = field(default_factory=dict)
    """Library, such as ``cudart``, by its soname, such as ``libcudart.so.13``."""
    symbols: dict[str, set[str]] = field(default_factory=lambda: defaultdict(set))
    """Functions of a library."""
    versions: dict[str, str] = field(default_factory=dict)
    """The version that a function is asked for with, where it has one."""


def _lines(*command: str | Path) -> list[str]:
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.splitlines()


def read_needs(folder: Path) -> Needs:
    """The sonames and functions of NVIDIA's libraries that the libraries in *folder* import."""
    needs = Needs()
    for library in sorted(folder.glob("lib*.so*")):
        for row in _lines("readelf", "-dW", library):
            if match := LIBRARY.search(row):
                needs.sonames[match[2]] = match[1]
        for row in _lines("nm", "-D", "--undefined-only", "--with-symbol-versions", library):
            name, _, version = row.split()[-1].partition("@")
            for owner, prefix in PREFIXES.items():
                if re.match(prefix, name):
                    needs.symbols[owner].add(name)
                    if version:
                        needs.versions[name] = version.strip("@")
    return needs


def entry_points(library: Path) -> set[str]:
    """Functions of the driver and of NVML that a library looks up by name: texts in its file."""
    names = re.findall(rb"\0((?:cu|nvml)[A-Z]\w+)(?=\0)", library.read_bytes())
    return {name.decode() for name in names}


def exported_names(library: Path) -> set[str]:
    """Names of the functions that a library defines."""
    rows = _lines("nm", "-D", "--defined-only", library)
    return {row.split()[-1].partition("@")[0] for row in rows}


def stub_source(library: str, names: Iterable[str]) -> str:
    """C source of functions that refuse; those that return a text return one."""
    status = NOT_SUPPORTED.get(library, 1)
    rows = [PRELUDE]
    for name in sorted(names):
        if re.search(r"(Error|Status|Result)(Get)?(String|Name)|Get(Error|Status)(String|Name)", name):
            rows.append(f'const char *{name}(void) {{ return "no model on the virtual device"; }}')
        else:
            rows.append(
                f'int {name}(void) {{ static int said; return refuse("{name}", {status}, &said); }}'
            )
    return "\n".join(rows) + "\n"


def version_script(soname: str, needs: Needs, names: Iterable[str]) -> str:
    """A linker script that gives each function the version it is asked for with."""
    nodes: dict[str, list[str]] = defaultdict(list)
    for name in sorted(names):
        nodes[needs.versions.get(name, soname)].append(name)
    blocks = [
        f"{node} {{ global: {' '.join(f'{name};' for name in members)} }};"
        for node, members in nodes.items()
    ]
    blocks.append("vgpu_private { local: *; };")
    return "\n".join(blocks) + "\n"

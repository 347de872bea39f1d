"""Builds the stand-ins for one torch wheel: g++, half a minute, no header of NVIDIA."""

from __future__ import annotations

import fcntl
import hashlib
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from zeromon_vgpu.stubs import (
    Needs,
    entry_points,
    exported_names,
    read_needs,
    stub_source,
    version_script,
)

SOURCES = Path(__file__).resolve().parent / "src"
MODEL = ["cost", "machine", "memory", "schedule", "timeline", "values"]
"""Sources of libvgpu.so, the model that all stand-ins share."""

STAND_INS = {
    "cudart": ["cudart", "cudart_streams", "cudart_memory", "cudart_kernels", "cudart_ipc"],
    "cuda": ["cuda"],
    "nccl": ["nccl", "nccl_collectives", "nccl_reduce", "nccl_host", "nccl_inspector", "nccl_ras"],
    "cublas": ["cublas"],
    "cublasLt": ["cublaslt"],
    "cudnn": ["cudnn", "cudnn_backend", "cudnn_rnn"],
    "cupti": ["cupti"],
    "nvidia-ml": ["nvml"],
}  # fmt: skip
"""Library to its sources; every other library that a wheel needs is stubs alone."""

ALWAYS = {"cuda": "libcuda.so.1", "nvidia-ml": "libnvidia-ml.so.1"}
"""Loaded by name at run time, so that no library lists them as needed."""

FLAGS = ["-std=c++17", "-O2", "-fPIC", "-Wall", "-Wextra", "-Werror", "-pthread"]


def source_fingerprint(torch: Path) -> str:
    """Changes with our sources and with the wheel."""
    digest = hashlib.sha256((torch / "version.py").read_bytes())
    for path in sorted([*SOURCES.iterdir(), *SOURCES.parent.glob("*.py")]):
        if path.name in {"build.py", "stubs.py"} or path.parent == SOURCES:
            digest.update(path.read_bytes())
    return digest.hexdigest()


def cuda_version(torch: Path) -> int:
    """Returns the version of CUDA that a wheel is built with, such as 12080 for 12.8."""
    match = re.search(r"^cuda\b.*'(\d+)\.(\d+)'", (torch / "version.py").read_text(), re.MULTILINE)
    if match is None:
        raise RuntimeError(f"{torch} is not a CUDA build of torch")
    return int(match[1]) * 1000 + int(match[2]) * 10


def cudnn_version(torch: Path) -> int:
    """Returns the version of cuDNN that a wheel names, such as 92000 for 9.20.0; else 9.20."""
    metadata = next(torch.parent.glob("torch-*.dist-info/METADATA"), None)
    match = metadata and re.search(r"nvidia-cudnn-cu\d+==(\d+)\.(\d+)\.(\d+)", metadata.read_text())
    major, minor, patch = map(int, match.groups()) if match else (9, 20, 0)
    return major * 10000 + minor * 100 + patch


def _compile_source(source: str, objects: Path, versions: list[str]) -> Path:
    target = objects / f"{source}.o"
    changed = max(path.stat().st_mtime for path in [SOURCES / f"{source}.cpp", *SOURCES.glob("*.h")])
    if target.exists() and target.stat().st_mtime > changed:
        return target
    hidden = [] if source in MODEL else ["-fvisibility=hidden"]
    command = ["g++", *FLAGS, *hidden, *versions, "-c", str(SOURCES / f"{source}.cpp")]
    command += ["-o", str(target)]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{source}.cpp does not compile:\n{done.stderr}")
    return target


def _link_library(target: Path, inputs: list[Path], *options: str) -> None:
    command = ["g++", "-shared", "-pthread", *map(str, inputs), "-o", str(target), *options]
    command += ["-Wl,-rpath,$ORIGIN", f"-Wl,-soname,{target.name}"]
    subprocess.run(command, check=True)


def _compile_stubs(library: str, names: set[str], objects: Path) -> list[Path]:
    if not names:
        return []
    source, target = objects / f"stubs-{library}.c", objects / f"stubs-{library}.o"
    source.write_text(stub_source(library, names))
    command = ["gcc", "-O1", "-fPIC", "-fno-builtin", "-c", str(source), "-o", str(target)]
    subprocess.run(command, check=True)
    return [target]


def _stand_in(library: str, soname: str, needs: Needs, built: dict[str, Path], target: Path) -> None:
    sources = [built[source] for source in STAND_INS.get(library, [])]
    below = [target / "libvgpu.so"] if sources else []
    if library in {"cuda", "nccl", "cublas", "cublasLt", "cudnn", "cupti"}:
        below += sorted(target.glob("libcudart.so*"))
    library_path, imported = target / soname, needs.symbols.get(library, set())
    objects = next(iter(built.values())).parent
    names: set[str] = set(imported)
    if sources:  # linked once without stubs, to see what is missing
        _link_library(objects / soname, [*sources, *below])
        names |= exported_names(objects / soname)
    defined = exported_names(objects / soname) if sources else set()
    missing = {name for name in imported if not defined & {name, f"{name}_v2"}}
    script = objects / f"{library}.map"
    script.write_text(version_script(soname, needs, names))
    options = [f"-Wl,--version-script={script}"] if library not in {"cuda", "nccl", "nvidia-ml"} else []
    _link_library(library_path, [*sources, *_compile_stubs(library, missing, objects), *below], *options)


def build_libraries(torch: Path, target: Path) -> Path:
    """Builds what the package *torch* needs in the folder *target*, unless it is there; returns it."""
    target.mkdir(parents=True, exist_ok=True)
    with (target / "lock").open("w") as file:  # two at once would link each other's halves
        fcntl.flock(file, fcntl.LOCK_EX)
        stamp, mark = target / "stamp", source_fingerprint(torch)
        if not stamp.exists() or stamp.read_text() != mark:
            _build_all(torch, target)
            stamp.write_text(mark)
    return target


def _build_all(torch: Path, target: Path) -> None:
    objects = target / "objects"
    objects.mkdir(parents=True, exist_ok=True)
    for old in target.glob("lib*.so*"):
        old.unlink()
    needs = read_needs(torch / "lib")
    for name in entry_points(torch / "lib" / "libc10_cuda.so"):
        needs.symbols["nvidia-ml" if name.startswith("nvml") else "cuda"].add(name)
    sonames = {**needs.sonames, **ALWAYS}
    modelled = {name: STAND_INS[name] for name in STAND_INS if name in sonames}
    sources = [*MODEL, *(source for group in modelled.values() for source in group)]
    versions = [f"-DVGPU_CUDA_VERSION={cuda_version(torch)}"]
    versions.append(f"-DVGPU_CUDNN_VERSION={cudnn_version(torch)}")
    with ThreadPoolExecutor(2) as pool:
        compiled = pool.map(lambda source: _compile_source(source, objects, versions), sources)
        built = dict(zip(sources, compiled, strict=True))
    _link_library(target / "libvgpu.so", [built[source] for source in MODEL])
    for library in sorted(sonames, key=lambda name: name != "cudart"):
        _stand_in(library, sonames[library], needs, built, target)

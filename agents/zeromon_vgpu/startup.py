"""Brings the virtual device into a Python process: called when Python starts, long before torch.

Reads ``VGPU_LIBRARIES`` (the folder of the stand-ins), ``VGPU_ARITHMETIC``, ``VGPU_RANKS`` (of ranks
that are simulated beside those that run), and ``VGPU_PLACES``: ranks of a node, ranks of the world,
and which of them the processes of the launcher are: ``8 16 0 1 8``.
"""

from __future__ import annotations

import ctypes
import importlib.abc
import importlib.machinery
import os
import sys
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any


class _AroundImport(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Loads the stand-ins before torch, and adapts each module of `ADAPTED` once it was imported."""

    def __init__(self) -> None:
        self._loaders: dict[str, Any] = {}

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name not in ADAPTED or name in self._loaders:
            return None
        spec = importlib.machinery.PathFinder.find_spec(name, path, target)
        if spec is not None and spec.loader is not None:
            self._loaders[name], spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        module: ModuleType | None = self._loaders[spec.name].create_module(spec)
        return module

    def exec_module(self, module: ModuleType) -> None:
        if module.__name__ == "torch":
            load_libraries(Path(os.environ["VGPU_LIBRARIES"]))
        self._loaders[module.__name__].exec_module(module)
        ADAPTED[module.__name__](module)


def begin_at_startup() -> None:
    """Prepares for the import of torch, once: arithmetic that is on twice would add in place twice."""
    place_rank(os.environ)
    if "VGPU_LIBRARIES" in os.environ and not any(
        isinstance(finder, _AroundImport) for finder in sys.meta_path
    ):
        sys.meta_path.insert(0, _AroundImport())


def place_rank(environment: MutableMapping[str, str]) -> None:
    """Makes the process the rank that it stands for, on that rank's node; its children inherit it."""
    if "RANK" not in environment or "VGPU_PLACES" not in environment:
        return
    per_node, world, *ranks = map(int, environment.pop("VGPU_PLACES").split())
    rank = ranks[int(environment["RANK"])]
    variables = {
        "RANK": rank, "ROLE_RANK": rank, "WORLD_SIZE": world, "ROLE_WORLD_SIZE": world,
        "LOCAL_RANK": rank % per_node, "LOCAL_WORLD_SIZE": per_node,
        "GROUP_RANK": rank // per_node, "GROUP_WORLD_SIZE": world // per_node,
    }  # fmt: skip
    environment.update((name, str(number)) for name, number in variables.items())


def load_libraries(folder: Path) -> None:
    """Loads the stand-ins, so that torch finds them by their sonames.

    The run path of torch's libraries comes before ``LD_LIBRARY_PATH``, and leads to NVIDIA's own where
    they are installed. The loader takes a library of a name that is loaded already.
    """
    for library in sorted(folder.glob("lib*.so*")):
        ctypes.CDLL(str(library))


def adapt_torch(torch: Any) -> None:
    """Adds what the variables ask for."""
    if os.environ.get("VGPU_ARITHMETIC"):
        turn_off_cudnn(torch)
        from zeromon_vgpu.arithmetic_mode import Arithmetic

        Arithmetic().__enter__()
    if os.environ.get("VGPU_RANKS"):
        from zeromon_vgpu import absent_ranks

        absent_ranks.adapt_process_groups(torch, Path(os.environ["VGPU_LIBRARIES"]))


def turn_off_cudnn(torch: Any) -> None:
    """Leaves convolutions and attention to torch's own operators, which the CPU has too."""
    from torch.nn import attention

    torch.backends.cudnn.enabled = False
    torch.backends.cuda.enable_cudnn_sdp(False)
    # From here on these setters do nothing, whatever kernel a script asks for
    type(torch.backends.cudnn).__dict__["enabled"].setter = bool
    torch._C._set_cudnn_enabled = torch._C._set_sdp_use_cudnn = bool
    attention._sdpa_kernel = lambda *_, **__: None


def adapt_deepspeed(builder: Any) -> None:
    """Replaces the extensions of DeepSpeed that nvcc would have to compile."""
    from zeromon_vgpu import frameworks

    frameworks.adapt_deepspeed(builder)


ADAPTED = {"torch": adapt_torch, "deepspeed.ops.op_builder.builder": adapt_deepspeed}
"""Module to what is called with it after its import."""

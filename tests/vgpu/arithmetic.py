"""Arithmetic on the virtual device, in every process that imports torch (``VGPU_ARITHMETIC=1``).

The environment's .pth file calls ``enable_on_import`` when Python starts, long before torch is there.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
from collections.abc import Sequence
from types import ModuleType


class _AfterTorch(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Turns arithmetic on once torch has been imported."""

    _real: importlib.abc.Loader

    def find_spec(
        self, name: str, path: Sequence[str | bytes] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if name != "torch":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec("torch")
        if spec is not None and spec.loader is not None:
            self._real, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return self._real.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._real.exec_module(module)
        from vgpu.arithmetic_mode import Arithmetic

        Arithmetic().__enter__()


def enable_on_import() -> None:
    """Turns arithmetic on as soon as torch is imported, once: twice would add in place twice."""
    if not any(isinstance(finder, _AfterTorch) for finder in sys.meta_path):
        sys.meta_path.insert(0, _AfterTorch())

"""Runs a callback when a module has been imported, without importing it ourselves."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

OnModule = Callable[[ModuleType], None]


class ImportWatch(MetaPathFinder):
    """A finder that finds nothing itself: it lets the others find, and adds a callback to the load.

    Each callback runs once, right after the module's body, before anyone else can take names from it.
    """

    def __init__(self) -> None:
        self._waiting: dict[str, OnModule] = {}

    def when_imported(self, name: str, callback: OnModule) -> None:
        """Runs *callback* with module *name*: now if it is loaded, else when it will be."""
        module = sys.modules.get(name)
        spec = getattr(module, "__spec__", None)
        if module is not None and not getattr(spec, "_initializing", False):
            callback(module)
            return
        self._waiting[name] = callback
        if module is not None and spec is not None and spec.loader is not None:
            return  # being imported right now; `sweep` will find it
        if self not in sys.meta_path:
            # a new list: another thread may be walking the old one, and would miss a finder
            sys.meta_path = [self, *sys.meta_path]

    def sweep(self) -> None:
        """Serves those whose module got loaded past us."""
        for name in list(self._waiting):
            module = sys.modules.get(name)
            if module is not None and not getattr(module.__spec__, "_initializing", False):
                self._waiting.pop(name)(module)

    def close(self) -> None:
        """Takes the finder away."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds *fullname* with the other finders and arms its loader."""
        if fullname not in self._waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = (
                find(fullname, path, target) if find and finder is not self else None
            )
            if spec is not None and spec.loader is not None:
                self._arm(fullname, spec.loader)
                return spec
        return None

    def _arm(self, fullname: str, loader: Loader) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None:
            return

        def exec_module(module: ModuleType) -> Any:
            execute(module)
            callback = self._waiting.pop(fullname, None)
            if callback is not None:
                callback(module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

"""Runs a callback when a module has been imported, without importing it; and times imports."""

import sys
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

from zeromon_agents.runtime.around import leave_to_python

OnModule = Callable[[ModuleType], None]


def _is_initializing(module: ModuleType | None) -> bool:
    """Returns whether the body of *module* is running. A stand-in for a module may have no spec."""
    return bool(getattr(getattr(module, "__spec__", None), "_initializing", False))


class ImportWatch(MetaPathFinder):
    """A finder that finds nothing itself: it calls the other finders, and adds a callback to the load.

    Each callback runs once, right after the module's body, before other code can import names from it.
    """

    def __init__(self) -> None:
        self._waiting: defaultdict[str, list[OnModule]] = defaultdict(list)

    def when_imported(self, name: str, callback: OnModule) -> None:
        """Runs *callback* with module *name*: now if it is loaded, otherwise after its import."""
        module = sys.modules.get(name)
        # A module is in sys.modules before its body runs, which would define the patched names anew
        if module is not None and not _is_initializing(module):
            callback(module)
            return
        self._waiting[name].append(callback)
        if module is not None and getattr(module.__spec__, "loader", None) is not None:
            return  # its import is under way: `sweep` will find it
        if self not in sys.meta_path:
            # a new list: another thread may be iterating over the old one, and would skip a finder
            sys.meta_path = [self, *sys.meta_path]

    def sweep(self) -> None:
        """Runs the callbacks of modules that were loaded without this finder."""
        for name in list(self._waiting):
            module = sys.modules.get(name)
            if module is not None and not _is_initializing(module):
                self._call(name, module)

    def close(self) -> None:
        """Removes the finder and drops the callbacks that have not run."""
        self._waiting.clear()
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Finds *fullname* with the other finders, and adds the callback to its loader."""
        if fullname not in self._waiting:
            return None
        for finder in list(sys.meta_path):
            find = getattr(finder, "find_spec", None)
            spec: ModuleSpec | None = (
                find(fullname, path, target) if find and finder is not self else None
            )
            if spec is not None and spec.loader is not None:
                self._add_callback(fullname, spec.loader)
                return spec
        return None

    leave_to_python(find_spec, and_callees=False)  # torch.compile would try it at each import

    def _add_callback(self, fullname: str, loader: Loader) -> None:
        execute = getattr(loader, "exec_module", None)
        # A loader of the old protocol has `load_module` alone: `sweep` finds its module later
        if execute is None:
            return

        def exec_module(module: ModuleType) -> Any:
            execute(module)
            self._call(fullname, module)

        loader.exec_module = exec_module  # type: ignore[method-assign]

    def _call(self, name: str, module: ModuleType) -> None:
        # Taken out first: the import and the heartbeat's `sweep` may come here at the same moment
        for callback in self._waiting.pop(name, ()):
            callback(module)


class ImportClock(MetaPathFinder):
    """A finder that finds nothing: it notes when the main thread looks for modules.

    An import lasts from the search for its module to the last search within it. The loaders stay as they
    are, so what the last module within it takes is not known.
    """

    def __init__(self) -> None:
        self._imports: list[list[int]] = []
        """The outermost ones: when they began, and the last search within."""
        self._outermost = ""
        self._main = threading.main_thread().ident

    def start(self, under_way: str, from_ns: int) -> None:
        """Begins with the import of *under_way*, which began at *from_ns*; 0: unknown."""
        if from_ns and not self._imports:
            self._outermost = under_way
            self._imports.append([from_ns, time.monotonic_ns()])
            sys.meta_path = [self, *sys.meta_path]

    def stop(self) -> None:
        """Notes no more."""
        if self in sys.meta_path:
            sys.meta_path = [finder for finder in sys.meta_path if finder is not self]

    def spent_ns(self, but_from_ns: int, but_until_ns: int) -> int:
        """Returns the time in imports but for those that began between the two times."""
        times = ((a, b) for a, b in self._imports if not but_from_ns <= a < but_until_ns)
        return sum(end_ns - start_ns for start_ns, end_ns in times)

    def find_spec(self, fullname: str, *_: Any) -> None:
        """Notes the search for *fullname*."""
        if threading.get_ident() == self._main:
            now_ns = time.monotonic_ns()
            if _is_initializing(sys.modules.get(self._outermost)):
                self._imports[-1][1] = now_ns
            else:
                self._outermost = fullname
                self._imports.append([now_ns, now_ns])

    leave_to_python(find_spec, and_callees=True)

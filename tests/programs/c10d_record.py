"""What C++ itself records of the collectives of a program: a count that zeromon has no part in.

That is gloo's Flight Recorder. Where torch keeps none for gloo, it is the profiler: gloo marks each
collective that it performs, under the same names, while a profiler is on.
"""

from __future__ import annotations

import json
import pickle
import tempfile
from pathlib import Path
from typing import Any

import torch

_KEYS = (
    "profiling_name", "input_sizes", "input_dtypes", "output_sizes", "output_dtypes",
    "process_group",
)  # fmt: skip
_DTYPES = {
    "float": "Float", "double": "Double", "c10::Half": "Half", "c10::BFloat16": "BFloat16",
    "long int": "Long", "int": "Int", "unsigned char": "Byte", "signed char": "Char",
}  # fmt: skip
"""What the profiler calls an element type -> what the Flight Recorder does."""


class Record:
    """The record of a process, from here on."""

    def __init__(self) -> None:
        self._dump = getattr(torch._C._distributed_c10d, "_dump_fr_trace", None)
        self.facts = {"recorder": self._dump is not None}
        """Whether gloo has a Flight Recorder, from which the agent has C++'s operations."""
        if self._dump is None:
            self._profiler = torch.profiler.profile(
                activities=[torch.profiler.ProfilerActivity.CPU], record_shapes=True
            )
            self._profiler.start()

    def entries(self) -> list[dict[str, Any]]:
        """The collectives so far, as the Flight Recorder lists them. Ends the record."""
        if self._dump is None:
            return self._profiled()
        wanted = {"includeCollectives": True, "includeStackTraces": False, "onlyActive": False}
        entries = pickle.loads(self._dump(**wanted))["entries"]
        return [{key: entry[key] for key in _KEYS} for entry in entries]

    def _profiled(self) -> list[dict[str, Any]]:
        self._profiler.stop()
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "trace.json"
            self._profiler.export_chrome_trace(str(path))
            events = json.loads(path.read_text())["traceEvents"]
        marks = [event for event in events if event.get("name", "").startswith("gloo:")]
        return [_entry(mark["name"], mark.get("args", {})) for mark in marks]


def _entry(name: str, facts: dict[str, Any]) -> dict[str, Any]:
    sizes = facts.get("Input Dims", [])
    dtypes = [_DTYPES[one] for one in facts.get("Input type", [])]
    world = torch.distributed.get_world_size()
    gathered = [[world, *size] for size in sizes]
    found = name, sizes, dtypes, gathered, dtypes, ("", "")
    return dict(zip(_KEYS, found, strict=True))

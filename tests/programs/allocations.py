"""Trains a little on the CPU under torch.profiler, and writes its memory as a snapshot: `FILE`.

torch makes the snapshot from the profile, as for its memory viewer; frames are written as the CUDA
allocator has them. To FILE.json go the bytes by torch's own category, which it finds from the flow of
data, at each event that allocates.
"""

from __future__ import annotations

import json
import pickle
import re
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.cuda._memory_viz import _profile_to_snapshot

_PLACE = re.compile(r"(.*)\((\d+)\): (.*)")


class Model(nn.Module):
    """Layers with a ReLU behind each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(4))

    def forward(self, batch: Any) -> Any:
        """The layers, one after the other."""
        for layer in self.layers:
            batch = torch.relu(layer(batch))
        return batch


def frame(name: str) -> dict[str, Any]:
    """A frame of the profiler as one of the allocator."""
    place = _PLACE.match(name)
    if place is None:
        return {"filename": "??", "line": 0, "name": name}
    return {"filename": place[1], "line": int(place[2]), "name": place[3]}


def main(path: Path) -> None:
    """Trains, and writes both files."""
    kept = {"profile_memory": True, "with_stack": True, "record_shapes": True}
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], **kept) as profile:
        model = Model()
        optimizer = torch.optim.AdamW(model.parameters())
        for _ in range(2):
            model(torch.ones(512, 256)).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    snapshot: dict[str, Any] = _profile_to_snapshot(profile)
    live: dict[int, tuple[str, int]] = {}
    categories = {}
    blocks = [block for segment in snapshot["segments"] for block in segment["blocks"]]
    events = snapshot["device_traces"][-1]
    for row in (*events, *blocks):
        row["frames"] = [frame(one["name"]) for one in row.get("frames", ())]
    for number, event in enumerate(events):
        if event["action"] == "alloc":
            live[event["addr"]] = event["category"], event["size"]
            sums: Counter[str] = Counter()
            for category, nbytes in live.values():
                sums[category] += nbytes
            categories[number] = sums
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    path.write_bytes(pickle.dumps(snapshot))
    path.with_suffix(".json").write_text(json.dumps(categories))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

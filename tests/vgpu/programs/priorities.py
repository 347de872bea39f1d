"""Products on streams of three priorities: ``priorities.py COUNT SEED``.

Each program is enqueued behind a sleep. What a program is, and the times of a product alone, is one line
of JSON a program: the timeline has the rest.
"""

from __future__ import annotations

import json
import os
import random
import sys
from pathlib import Path

import torch
from vgpu.programs.device import CYCLES_PER_MS

PRIORITIES = (0, 0, -1, -3)  # torch has no stream above -3
SIZES = (512, 768, 1024, 1536, 2048)


def main() -> None:
    count, seed = map(int, sys.argv[1:])
    draw = random.Random(seed)
    matrices = [torch.empty(size, size, device="cuda", dtype=torch.bfloat16) for size in SIZES]
    results = [torch.empty_like(matrix) for matrix in matrices]
    streams = [torch.cuda.Stream(priority=priority) for priority in PRIORITIES]
    programs = []

    def multiply(size: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            torch.mm(matrices[size], matrices[size], out=results[size])

    for size in range(len(SIZES)):
        torch.cuda.synchronize()
        multiply(size, streams[0])
    for _ in range(count):
        torch.cuda.synchronize()
        torch.cuda._sleep(100 * CYCLES_PER_MS)
        gate = torch.cuda.current_stream().record_event()
        for stream in streams:
            stream.wait_event(gate)
        program = [
            (draw.randrange(len(streams)), draw.randrange(len(SIZES)))
            for _ in range(draw.randint(4, 20))
        ]
        for stream, size in program:
            multiply(size, streams[stream])
        programs.append(program)
    torch.cuda.synchronize()
    facts = {"priorities": [stream.priority for stream in streams], "sizes": SIZES}
    out = Path(os.environ["VGPU_DIR"]) / "priorities.json"
    out.write_text(json.dumps(facts | {"programs": programs}))


if __name__ == "__main__":
    main()

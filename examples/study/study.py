"""Measures what the ZeRO paper claims, by the real frameworks on virtual CUDA devices.

  python examples/study/study.py                 all parts, about half an hour
  python examples/study/study.py memory batch    two of them
  python examples/study/study.py --publish       also docs/evidence/study.md and its charts

memory         states of 7 billion parameters on four devices: 112, 49, 38.5, 28 GB?
volumes        elements that a step sends: 2 Psi, and 3 Psi with ZeRO-3?
overlap        is a step 10 to 20 % shorter by overlap_comm?
batch          is ZeRO-2 faster than ZeRO-3, until its memory ends?
offload        what does the optimizer on the host cost?
checkpointing  what does recomputation save, and what does it cost?

Real: DeepSpeed, FSDP, DDP, torch's CUDA build and its allocator, so bytes, memory, collectives, and
what overlaps. Modelled: how long kernels, copies and links take. One process stands for four ranks.
Needs the environment of `make vgpu`; no GPU. A job that has run is not run again: remove --folder.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / name) for name in ("examples/study", "tools", "agents", "")]

from charts import write_charts  # noqa: E402
from lab import Lab, print_progress  # noqa: E402
from parts import PARTS, Part  # noqa: E402

IMAGES = ROOT / "docs" / "images"
TORCH = "2.13.0"
VGPU = ROOT / "build" / "vgpu" / f"torch-{TORCH}"


def print_table(part: Part) -> None:
    """Prints the table in aligned columns."""
    lines = [list(part.head), *map(list, part.rows)]
    widths = [max(len(line[at]) for line in lines) for at in range(len(part.head))]
    for line in lines:
        print("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip())
    print()


def publish(found: dict[str, Part]) -> None:
    """Stores tables and charts for docs/evidence/study.md."""
    from importlib import metadata

    from evidence_pages import commit_here, publish as publish_entries, today

    machine = f"virtual devices, torch {TORCH}, DeepSpeed {metadata.version('deepspeed')}"
    stamp = {
        "tool": "examples/study/study.py", "date": today(), "commit": commit_here(),
        "machine": machine,
    }  # fmt: skip
    entries = {
        name: {**stamp, "head": list(part.head), "rows": [list(row) for row in part.rows]}
        for name, part in found.items()
    }
    publish_entries("study", entries)
    write_charts({IMAGES / f"study-{name}.svg": part.chart for name, part in found.items()})


def main() -> int:
    """Runs the chosen parts, and prints a table for each."""
    formatter = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=formatter)
    parser.add_argument("parts", nargs="*", metavar="PART", help="default: all")
    parser.add_argument(
        "--python", type=Path, default=VGPU / "bin" / "python", help="a Python with torch for CUDA"
    )
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "build" / "study", help="where results are kept"
    )
    parser.add_argument("--publish", action="store_true", help="write docs/evidence and its charts")
    options = parser.parse_args()
    if unknown := set(options.parts) - set(PARTS):
        parser.error(f"unknown: {', '.join(sorted(unknown))}; parts are {', '.join(PARTS)}")
    if not options.python.exists():
        print(f"no {options.python}: make vgpu makes it, or give --python", file=sys.stderr)
        return 3
    os.environ.setdefault("XDG_CACHE_HOME", str(VGPU.parent / "cache"))
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)  # else each run compiles torch's Python anew
    lab = Lab(options.python, options.folder, print_progress)
    found = {}
    for name in options.parts or PARTS:
        found[name] = PARTS[name](lab)
        print_progress("")
        print(f"{name}: {(PARTS[name].__doc__ or '').splitlines()[0]}\n")
        print_table(found[name])
    if options.publish:
        publish(found)
    return 0


if __name__ == "__main__":
    sys.exit(main())

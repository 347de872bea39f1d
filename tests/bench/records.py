"""The figures of a bench as records, of which `run.py` makes one file."""

from __future__ import annotations

import json
import os

FILE = "ZEROMON_BENCH_FIGURES"
"""The environment variable with the file to which a bench adds; without it, a bench only prints."""


def keep(
    name: str, value: float | None, unit: str, better: str = "lower", noise: float | None = None
) -> None:
    """Adds a figure; None is no figure.

    *better*: ``lower``, ``higher`` or ``zero``, an error of either sign. *noise*: by how much it differs
    from run to run, in its unit, where the bench knows.
    """
    if FILE in os.environ and value is not None:
        row = {"name": name, "value": value, "unit": unit, "better": better, "noise": noise}
        with open(os.environ[FILE], "a") as file:
            file.write(json.dumps(row) + "\n")

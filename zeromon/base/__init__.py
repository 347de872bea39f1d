"""Foundation of every package: errors that say what to do, figures with their units, terminals."""

import os
from typing import TextIO


def can_rewrite_lines(stream: TextIO) -> bool:
    """True for a terminal, but in the cell of a notebook, whose page keeps every line."""
    # Front ends without a Jupyter server set no JPY_PARENT_PID; the kernel sets the other variable
    in_cell = "JPY_PARENT_PID" in os.environ or "backend_inline" in os.environ.get("MPLBACKEND", "")
    return stream.isatty() and not in_cell

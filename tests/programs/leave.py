"""The way out of a test program that had a gloo group."""

import atexit
import os
import sys


def leave() -> None:
    """Runs what is registered at exit, and goes without the interpreter's own finalization.

    Torch's gloo threads outlive ``destroy_process_group``; some exits (one in some hundred, with
    zeromon or without) end in "terminate called without an active exception".
    """
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)

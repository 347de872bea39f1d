"""The lines that a tool's own documentation asks for in a script, by the tool that TOOL names."""

import os
from contextlib import nullcontext

import torch.distributed as dist

TOOL = os.environ.get("TOOL", "")

if TOOL == "traceml":
    import traceml_ai as traceml
elif TOOL == "comms_logger":
    import deepspeed


def begin() -> None:
    """After the process group and before the model."""
    if TOOL == "traceml":
        traceml.init(mode="auto")
    elif TOOL == "comms_logger":
        deepspeed.init_distributed("gloo")
        deepspeed.comm.configure(enabled=True, prof_all=True, verbose=False, debug=False)
    elif TOOL == "debug_server":
        from torch.distributed.debug import start_debug_server

        start_debug_server(port=int(os.environ["DEBUG_PORT"]))


def each_step(model):
    """Around a step."""
    return traceml.trace_step(model) if TOOL == "traceml" else nullcontext()


def communicator():
    """What the script calls for a collective."""
    return deepspeed.comm if TOOL == "comms_logger" else dist


def end() -> None:
    """After the last step."""
    if TOOL == "comms_logger":
        deepspeed.comm.log_summary()

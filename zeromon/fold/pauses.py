"""Which expected pause a Python stack shows: what takes long in a healthy run as well. Pure."""

_EVALUATES = "evaluates"
STARTS = "has not ended its first step"
IN_DEBUGGER = "is stopped in a debugger"

_EXPECTED = (
    (IN_DEBUGGER, ("/pdb.py:", "/bdb.py:", "/debugpy/", "/pydevd")),
    ("generates text", ("/transformers/generation/utils.py:", "/vllm/entrypoints/llm.py:")),
    ("compiles", ("/torch/_dynamo/", "/torch/_inductor/", "/triton/compiler/", "/cpp_extension.py:")),
    (
        "saves or loads a checkpoint",
        (
            "/torch/serialization.py:", "/torch/distributed/checkpoint/", "/safetensors/",
            "/checkpoint_engine/", " in save_checkpoint", " in load_checkpoint", " in save_pretrained",
        ),
    ),
)  # fmt: skip
"""Reasons for a pause, and the frames that show them."""

_LOADER = ("/torch/utils/data/dataloader.py:",)


def expected_pause_reason(stack: tuple[str, ...], *, evaluating: bool) -> str:
    """Returns what a rank with *stack* is expected to take long for; "" where the stack shows nothing.

    *evaluating*: whether a model was in evaluation mode when the stack was taken.
    """
    for reason, marks in _EXPECTED:
        if _shows_mark(stack, marks):
            return reason
    return _EVALUATES if evaluating and not waits_for_batch(stack) else ""


def waits_for_batch(stack: tuple[str, ...]) -> bool:
    """Returns True if *stack* shows that the rank waits for a batch of its DataLoader."""
    return _shows_mark(stack, _LOADER)


def _shows_mark(stack: tuple[str, ...], marks: tuple[str, ...]) -> bool:
    return any(mark in frame for frame in stack for mark in marks)

"""Names that torch's profiler and Flight Recorder give to element types and collectives."""

from functools import lru_cache

from zeromon.ring.codes import Op

ITEM_BYTES = {
    "Float": 4, "Double": 8, "Half": 2, "BFloat16": 2, "Long": 8, "Int": 4, "Short": 2, "Char": 1,
    "Byte": 1, "Bool": 1, "Float8_e4m3fn": 1, "Float8_e5m2": 1, "ComplexFloat": 8,
}  # fmt: skip
"""Element type -> its size, bytes."""

# a name comes before the names that it contains
_PARTS = (
    ("reduce_scatter", Op.REDUCE_SCATTER), ("reducescatter", Op.REDUCE_SCATTER),
    ("all_gather", Op.ALL_GATHER), ("allgather", Op.ALL_GATHER), ("all_reduce", Op.ALL_REDUCE),
    ("allreduce", Op.ALL_REDUCE), ("all_to_all", Op.ALL_TO_ALL), ("alltoall", Op.ALL_TO_ALL),
    ("broadcast", Op.BROADCAST), ("cross_device_reduce", Op.ALL_REDUCE),
    # NCCL's kernel of send, recv, all-to-all, gather and scatter
    ("sendrecv", Op.NONE),
    ("gather", Op.GATHER), ("scatter", Op.SCATTER), ("barrier", Op.BARRIER), ("reduce", Op.REDUCE),
    ("send", Op.SEND), ("recv", Op.RECV),
)  # fmt: skip


@lru_cache(maxsize=4096)
def operation_named(name: str) -> Op:
    """Returns the operation of a kernel or collective by its name; NONE for an unknown name."""
    text = name.lower()
    return next((op for part, op in _PARTS if part in text), Op.NONE)

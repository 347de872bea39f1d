"""The records of what batches are made of; see :mod:`zeromon.ring.events`."""

from typing import NamedTuple


class Loading(NamedTuple):
    """What the DataLoaders of a rank have done so far, workers included."""

    t_ns: int
    batches: int
    fetch_ns: int
    transform_ns: int
    """The part of it in compositions of transforms that the agent knows."""
    collate_ns: int


class LoadingRead(NamedTuple):
    """What was read for some batches, about five a second of each worker."""

    t_ns: int
    read_bytes: int
    """By system calls, from wherever: page cache, disk, network, pipe."""
    disk_bytes: int
    major_faults: int
    nfs_bytes: int = 0
    """That the node read from NFS servers meanwhile, for whomever."""

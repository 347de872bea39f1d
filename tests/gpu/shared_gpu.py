"""Several ranks of NCCL on one GPU: each has a host's name of its own, and they talk over sockets."""

from __future__ import annotations

import os

import torch


def share(rank: str) -> None:
    """Lets this process join a group with others on its GPU; before NCCL begins.

    NCCL takes several ranks on one GPU where each has a host's name of its own (before 2.30) or where
    that is allowed (since).
    """
    os.environ["NCCL_HOSTID"] = f"zm{rank}"
    if torch.cuda.nccl.version() >= (2, 30):
        os.environ["NCCL_MULTI_RANK_GPU_ENABLE"] = "1"
    os.environ.update(
        NCCL_NET="Socket", NCCL_SOCKET_IFNAME="lo", NCCL_IB_DISABLE="1", NCCL_P2P_DISABLE="1",
        NCCL_SHM_DISABLE="1", NCCL_NVLS_ENABLE="0", NCCL_MAX_CTAS="2",
    )  # fmt: skip

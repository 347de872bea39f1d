"""The part of zeromon that lives inside a training process.

``zeromon run -- ...`` starts it without a change to the script. A script can also say::

    import zeromon_agents
    zeromon_agents.start()

Importing this package loads nothing else; :func:`start` needs torch.
"""

from __future__ import annotations


def start() -> None:
    """Watches this process: at once if it is a rank already, else as soon as it becomes one."""
    import torch.distributed
    from torch.distributed import distributed_c10d

    from zeromon_agents.bootstrap import BOOTSTRAP

    BOOTSTRAP.install(distributed_c10d)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        BOOTSTRAP.start_safely()


def stop() -> list[str]:
    """Takes every hook out of this process.

    Returns the names that another tool has patched over ours since; those stay, and pass through.
    """
    from zeromon_agents.bootstrap import BOOTSTRAP

    return BOOTSTRAP.stop()

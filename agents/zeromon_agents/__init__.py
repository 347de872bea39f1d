"""The agent: the part of zeromon that runs inside a training process.

``zeromon run -- ...`` starts the agent without a change to the script. A script can also call::

    import zeromon_agents
    zeromon_agents.start()

Importing this package imports nothing else. :func:`start` imports torch.
"""


def start() -> None:
    """Starts the agent: at once in a process that is a rank already, else as soon as it becomes one."""
    import torch.distributed
    from torch.distributed import distributed_c10d

    from zeromon_agents.runtime.bootstrap import BOOTSTRAP

    BOOTSTRAP.install(distributed_c10d)
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        BOOTSTRAP.start_safely()


def stop() -> list[str]:
    """Removes every hook from this process.

    Returns the names that another tool has patched since. Those patches stay, and the hooks below them
    only pass calls on.
    """
    from zeromon_agents.runtime.bootstrap import BOOTSTRAP

    return BOOTSTRAP.stop()

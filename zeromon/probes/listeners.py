"""Which users listen on a port of this machine, from ``/proc/net/tcp`` (proc(5))."""

from pathlib import Path

_TABLES = ("/proc/net/tcp", "/proc/net/tcp6")
_LISTENS = "0A"
_LOCAL, _STATE, _UID = 1, 3, 7
"""Places of the columns."""


def listening_users(port: int, tables: tuple[str, ...] = _TABLES) -> set[int] | None:
    """Returns the uids that listen on *port*, at any address; None where the kernel does not tell."""
    found: set[int] = set()
    told = False
    for table in tables:
        try:
            lines = Path(table).read_text().splitlines()[1:]
        except OSError:
            continue
        told = True
        for line in lines:
            words = line.split()
            listens = len(words) > _UID and words[_STATE] == _LISTENS
            if listens and int(words[_LOCAL].rpartition(":")[2], 16) == port:
                found.add(int(words[_UID]))
    return found if told else None

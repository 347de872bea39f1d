"""Finds the cgroups of a process for one controller; cgroup versions 1 and 2. Only reads files."""

import os
from contextlib import suppress
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def read_small_file(path: str | Path) -> str:
    """Returns the text of a small file, at less cost than a Python file. Raises :class:`OSError`."""
    fd = os.open(path, os.O_RDONLY)
    try:
        content = b""
        while chunk := os.read(fd, 1 << 16):
            content += chunk
    finally:
        os.close(fd)
    return content.decode(errors="replace")


def cgroup_folders(
    pid: int, controller: str, proc: Path = PROC, cgroup: Path = CGROUP
) -> list[Path]:
    """Returns the cgroup folders of *controller* that contain *pid*, the innermost first."""
    try:
        rows = read_small_file(proc / str(pid) / "cgroup").splitlines()
    except OSError:
        return []
    cgroups: list[Path] = []
    for row in rows:
        _, _, tail = row.partition(":")
        controllers, _, path = tail.partition(":")
        if controller in controllers.split(","):
            base = cgroup / controller
        elif not controllers:
            base = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
        else:
            continue
        folder = base / path.strip("/")
        # a container may lack the host's path: the limit is then at the root of its cgroups
        levels = [folder, *folder.parents] if folder.is_dir() else [base]
        cgroups += [level for level in levels if level == base or base in level.parents]
    return [level for level in cgroups if (level / "cgroup.procs").exists()]


def read_word_lines(path: str | Path) -> list[list[str]]:
    """Returns the words of each non-empty line; [] where the file cannot be read."""
    with suppress(OSError, ValueError):
        return [fields for row in read_small_file(path).splitlines() if (fields := row.split())]
    return []

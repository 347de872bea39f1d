"""Which cgroups a process is in, for one controller; versions 1 and 2. Files are read, nothing else."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def folders(pid: int, controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """The folders of *controller*'s cgroups that *pid* is in, the innermost first."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    found: list[Path] = []
    for line in lines:
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controller in controllers.split(","):
            base = cgroup / controller
        elif not controllers:
            base = cgroup / "unified" if (cgroup / "unified").is_dir() else cgroup
        else:
            continue
        folder = base / path.strip("/")
        # in a container's own view the path of the host may not exist: its root is the limit then
        levels = [folder, *folder.parents] if folder.is_dir() else [base]
        found += [level for level in levels if level == base or base in level.parents]
    return [level for level in found if (level / "cgroup.procs").exists()]


def lines_of(path: Path) -> list[list[str]]:
    """The words of each line that has some; none where the file cannot be read."""
    with suppress(OSError, ValueError):
        return [words for line in path.read_text().splitlines() if (words := line.split())]
    return []

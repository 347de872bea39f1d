"""Finds the cgroups of a process for one controller; cgroup versions 1 and 2. Only reads files."""

from contextlib import suppress
from pathlib import Path

PROC, CGROUP = Path("/proc"), Path("/sys/fs/cgroup")


def folders(pid: int, controller: str, proc: Path = PROC, cgroup: Path = CGROUP) -> list[Path]:
    """Returns the cgroup folders of *controller* that contain *pid*, the innermost first."""
    try:
        lines = (proc / str(pid) / "cgroup").read_text().splitlines()
    except OSError:
        return []
    cgroups: list[Path] = []
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
        # a container may lack the host's path: the limit is then at the root of its cgroups
        levels = [folder, *folder.parents] if folder.is_dir() else [base]
        cgroups += [level for level in levels if level == base or base in level.parents]
    return [level for level in cgroups if (level / "cgroup.procs").exists()]


def lines_of(path: Path) -> list[list[str]]:
    """Returns the words of each non-empty line; [] where the file cannot be read."""
    with suppress(OSError, ValueError):
        return [words for line in path.read_text().splitlines() if (words := line.split())]
    return []

"""Where runs live: rings in a private folder of this user, records in the user's state folder.

The ring folder is in memory (``/dev/shm``) when there is room, else on disk: rings must never
take the last of a small ``/dev/shm`` from the job's own workers. ``ZEROMON_DIR`` overrides it.
"""

import json
import os
import re
import secrets
import shutil
import stat
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from zeromon.base.errors import RingError, os_errors_as
from zeromon.ring.buffer import ring_file_size

CORE = Path(__file__).resolve().parents[2]
"""The folder that holds the package ``zeromon``."""
SHIM = CORE / "zeromon" / "attach" / "payload"
"""The folder that ``zeromon run`` puts first on the PYTHONPATH of a training command."""
NOTIFY = "notify.json"
"""The file of a run's folder that has the URLs for its alerts."""
TRACK = "track-"
"""The beginning of the names of files that say what `--track` cannot send."""
RUN_NAME = "name.json"
"""The file of a run's folder that has the run's name and when it started, seconds since the epoch."""
LOCK = "collector.lock"
"""The file beside the runs that the collector of the node holds locked."""
_ROOM_FOR_RINGS = 64
_RUN_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,79}")


def user_ring_roots() -> list[Path]:
    """The folders that may hold this user's runs, in order of preference.

    Everybody can make the first two, before this user does: a folder of somebody else is left out.
    """
    override = os.environ.get("ZEROMON_DIR")
    if override:
        return [Path(override).absolute()]
    roots = [Path("/dev/shm") / f"zeromon-{os.getuid()}", *_temporary_roots()]
    with suppress(RingError):
        roots.append(record_store_root() / "live")
    return [
        root for root in roots if not root.is_symlink() and owner_uid_of(root) in (None, os.getuid())
    ]


def _temporary_roots() -> list[Path]:
    """The folder for what may go; none where no temporary folder can be written."""
    with suppress(OSError):
        return [Path(tempfile.gettempdir()) / f"zeromon-{os.getuid()}"]
    return []


def owner_uid_of(path: Path) -> int | None:
    """Returns the uid of *path*, of a link itself; None where there is nothing."""
    try:
        return path.lstat().st_uid
    except OSError:
        return None


def choose_ring_root() -> Path:
    """The folder for a new run's rings; made private, and refused if it is not ours."""
    roots = user_ring_roots()
    if os.environ.get("ZEROMON_DIR"):  # the user's own folder: made if need be, its mode left alone
        return make_private_folder(roots[0], tighten=False)
    if not roots:
        raise RingError("every folder for runs belongs to someone else", "Set ZEROMON_DIR.")
    for root in roots[:-1]:
        if _has_free_space(root.parent):
            return make_private_folder(root)
    return make_private_folder(roots[-1])


def _has_free_space(folder: Path) -> bool:
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return False
    return os.access(folder, os.W_OK) and free >= _ROOM_FOR_RINGS * ring_file_size()


def make_private_folder(folder: Path, *, tighten: bool = True) -> Path:
    """Creates *folder* with mode 0700, and checks that an existing one belongs to this user.

    *tighten*: an existing one that others can read is made private, too.
    """
    with os_errors_as(RingError, f"use {folder}"):
        _make_folder(folder)
        folder_stat = folder.lstat()
    if reason := refusal_reason(folder_stat):
        raise RingError(f"{folder} {reason}")
    if tighten and folder_stat.st_mode & 0o077:
        folder.chmod(0o700)
    return folder


def _make_folder(folder: Path) -> None:
    """Makes *folder*, and the parents that it lacks, with mode 0700 whatever the umask grants."""
    try:
        folder.mkdir(mode=0o700)
    except FileNotFoundError:
        if folder.parent == folder:
            raise
        # mkdir(parents=True) gives parents the mode of the umask, so others may read them
        _make_folder(folder.parent)
        # Another rank of the node may have made it meanwhile
        folder.mkdir(mode=0o700, exist_ok=True)
    except OSError:
        # For an existing folder, mkdir() may fail with EROFS or EACCES in place of EEXIST
        if not folder.is_dir():
            raise


def refusal_reason(folder_stat: os.stat_result) -> str:
    """Why a folder is not used, by what is at its path: ``is a link``; "" for one of this user."""
    if stat.S_ISLNK(folder_stat.st_mode):
        return "is a link"
    if not stat.S_ISDIR(folder_stat.st_mode):
        return "is not a folder"
    return (
        ""
        if folder_stat.st_uid == os.getuid()
        else f"belongs to someone else (uid {folder_stat.st_uid})"
    )


@contextmanager
def anchored_folder(folder: Path, depth: int, *, make: bool = True) -> Iterator[Path]:
    """Yields another path of *folder*, by its descriptor; see :func:`open_private_folder`."""
    fd = open_private_folder(folder, depth, make=make)
    try:
        yield path_by_descriptor(fd)
    finally:
        os.close(fd)


def path_by_descriptor(fd: int) -> Path:
    """The path by which this process reaches the folder *fd*, whatever happens to its name."""
    return Path(f"/proc/self/fd/{fd}")


def open_private_folder(folder: Path, depth: int, *, make: bool = True) -> int:
    """Returns a descriptor of *folder*; it and *depth* folders above it belong to this user.

    Each is opened by the descriptor of the one above it, so that no link is followed, also none that is
    put there meanwhile. *make*: those that are missing are made, with mode 0700; all but the uppermost,
    which the user may have chosen, are made private. Raises :class:`RingError`.
    """
    path = folder.parents[depth - 1]
    fd = -1
    try:
        if make:
            _make_folder(path)
        fd = _open_folder(path, path)
        for name in folder.parts[-depth:]:
            above, path = fd, path / name
            try:
                if make:
                    with suppress(FileExistsError):
                        os.mkdir(name, 0o700, dir_fd=above)
                fd = _open_folder(path, name, above)
            finally:
                os.close(above)
            if os.fstat(fd).st_mode & 0o077:
                os.fchmod(fd, 0o700)
    except OSError as error:
        raise RingError(f"cannot use {path}: {error.strerror}", OWN_FOLDER) from error
    return fd


OWN_FOLDER = "Set ZEROMON_STORE to a folder of your own, or to one that does not exist yet."


def _open_folder(path: Path, name: str | Path, above: int | None = None) -> int:
    """Returns a descriptor of the folder *path*, which is *name* in *above*."""
    # Before open(), whose ELOOP or ENOTDIR does not tell the user what is in the way
    if reason := refusal_reason(os.stat(name, dir_fd=above, follow_symlinks=False)):
        raise RingError(f"{path} {reason}", OWN_FOLDER)
    flags = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
    fd = os.open(name, flags, dir_fd=above)
    if reason := refusal_reason(os.fstat(fd)):  # it was replaced meanwhile
        os.close(fd)
        raise RingError(f"{path} {reason}", OWN_FOLDER)
    return fd


def foreign_reason(*folders: Path) -> str:
    """Why one of *folders* is not used, ``/x is a link``; "" where each is this user's or missing."""
    for folder in folders:
        with suppress(OSError):
            if reason := refusal_reason(folder.lstat()):
                return f"{folder} {reason}"
    return ""


def user_state_folder() -> Path | None:
    """Returns where this user's programs keep their state; None for a user without a home."""
    if os.environ.get("XDG_STATE_HOME"):
        return Path(os.environ["XDG_STATE_HOME"])
    with suppress(RuntimeError):
        return Path.home() / ".local" / "state"
    return None


def record_store_root() -> Path:
    """Where the records of finished runs are kept (``$XDG_STATE_HOME/zeromon``).

    A user without a home, as in some containers, has them in the temporary folder. Raises
    :class:`RingError` where there is none either.
    """
    override = os.environ.get("ZEROMON_STORE")
    if override:
        return Path(override).absolute()
    state = user_state_folder()
    if state is not None:
        return state / "zeromon"
    for folder in _temporary_roots():
        if not folder.is_symlink() and owner_uid_of(folder) in (None, os.getuid()):
            return folder / "store"
    raise RingError("there is no folder for records", "Set ZEROMON_STORE.")


def read_run_name(folder: Path) -> tuple[str, float]:
    """The name of the run in *folder* and when it started, by :data:`RUN_NAME`; "" and 0 without it."""
    with suppress(OSError, ValueError, TypeError):
        name, started = json.loads((folder / RUN_NAME).read_bytes())
        return str(name), float(started)
    return "", 0.0


def ring_paths(folder: Path) -> list[Path]:
    """The rings in the folder of a run, in the order of their names. A glob takes ten times as long."""
    try:
        names = os.listdir(folder)
    except OSError:
        return []
    ring_names = (name for name in sorted(names) if name.startswith("rank") and name.endswith(".ring"))
    return [folder / name for name in ring_names]


def rank_of_ring(name: str) -> int:
    """Returns the rank of the ring with the file *name*; -1 where the name has none."""
    number = name.split(".")[0].removeprefix("rank")
    return int(number) if number.isdecimal() else -1


def is_run_id(name: str) -> bool:
    """Returns True if *name* may name a run (and so a folder)."""
    return _RUN_ID.fullmatch(name) is not None


def new_run_id(command: list[str]) -> str:
    """A short name for a run: the script, the hour, and three letters against collisions."""
    letters = "".join(secrets.choice("abcdefghjkmnpqrstuvwxyz") for _ in range(3))
    return f"{script_name_of(command)}-{time.strftime('%H%M%S')}-{letters}"


def script_name_of(command: list[str]) -> str:
    """The script in *command*, or its program, as a part of a run's name."""
    stem = next((Path(argument).stem for argument in command if argument.endswith(".py")), "")
    stem = stem or next(
        (Path(argument).name for argument in command if not argument.startswith("-")), "run"
    )
    return re.sub(r"[^A-Za-z0-9_]+", "_", stem).strip("_")[:24] or "run"

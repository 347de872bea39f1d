"""``sys.remote_exec`` of Python 3.14, the official method, which a waiting main thread never executes.

The caller must have the target's version, so the target's own interpreter calls it.
"""

import os
import subprocess
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from tempfile import mkstemp

from zeromon.attach.inject.target import wait_for

_PATIENCE_SECONDS = 2.0
_CALL = "import sys; sys.remote_exec(int(sys.argv[1]), sys.argv[2])"


def execute(pid: int, line: str, began: Callable[[], bool]) -> bool:
    """Whether process *pid* has begun with *line* within two seconds.

    A thread that wakes up later finds the script empty, and its work claimed.
    """
    descriptor, name = mkstemp(prefix=f"zeromon-{pid}-", suffix=".py")
    script = Path(name)
    with os.fdopen(descriptor, "w") as file:
        file.write(line)
    with suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            [str(Path(f"/proc/{pid}/exe").readlink()), "-I", "-S", "-c", _CALL, str(pid), name],
            capture_output=True,
            timeout=_PATIENCE_SECONDS,
            check=False,
        )
        if asked.returncode == 0 and wait_for(began, _PATIENCE_SECONDS):
            script.unlink(missing_ok=True)
            return True
        if asked.returncode:
            script.unlink(missing_ok=True)
            return False
    script.write_text("")
    return False

"""Tokens of the servers, and the private files in which this user's programs find them.

Collector, dashboard and MCP over HTTP answer nobody without a token, also on loopback: every user of a
node reaches its ports. A server takes the *job token* where the user has set one (``ZEROMON_TOKEN``),
which also signs what nodes tell each other (:mod:`zeromon.ring.tokens`), else the *user token*, a
random one in a file that only this user can read.

A training command does not inherit ``ZEROMON_TOKEN``: children, core dumps and libraries that log their
environment would have it. `zeromon run` writes it into the run's folder, where the agents read it.
"""

import hmac
import json
import os
import secrets
import stat
import threading
import time
from collections import OrderedDict
from collections.abc import Iterator, Mapping, MutableMapping
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

from zeromon.errors import RingError
from zeromon.ring import paths
from zeromon.ring.files import replace_file

TOKEN, TOKEN_FILE = "ZEROMON_TOKEN", "ZEROMON_TOKEN_FILE"

NAME = "token"
"""The name of the file that has a token, in the folder of a run and in that of this user's state."""
_MAX_BYTES = 4096


def job_token(run_dir: Path | None = None) -> str:
    """The token that all nodes of the job share; "" where the user has set none.

    It is in ``ZEROMON_TOKEN``, in the folder of the run, or in the file of ``ZEROMON_TOKEN_FILE``.
    *run_dir*: the run's folder, by default that of this process.
    """
    environment = os.environ
    if environment.get(TOKEN):
        return environment[TOKEN]
    folder = run_dir or environment.get("ZEROMON_RUN_DIR")
    if folder and (token := _content(Path(folder) / NAME)):
        return token
    return _content(Path(environment[TOKEN_FILE])) if environment.get(TOKEN_FILE) else ""


def hand_over(environment: MutableMapping[str, str], run_dir: Path) -> None:
    """Moves the job token from *environment* into a private file of the run's folder."""
    token = environment.pop(TOKEN, "")
    if token:
        replace_file(run_dir / NAME, f"{token}\n")


def server_token() -> str:
    """The token of a server that this process starts: the job's where there is one, else the user's."""
    return job_token() or user_token()


def user_token() -> str:
    """The token of this user; one for this process alone where no private file can be made."""
    path = token_file()
    return _content(path) if path is not None else _unsaved_token()


def token_file() -> Path | None:
    """The file with this user's token, made if need be; None where no folder can be written."""
    for folder in _folders():
        with suppress(OSError, RingError):
            path = paths.make_private(folder) / NAME
            if not _is_private(path):
                path.unlink(missing_ok=True)
                _make(path)
            return path
    return None


@cache
def _unsaved_token() -> str:
    return secrets.token_urlsafe(24)


def _folders() -> Iterator[Path]:
    """The folders that may have the file: one that outlives a reboot, else those of live runs."""
    state = paths.state_folder()
    if state is not None:
        yield state / "zeromon"
    yield from paths.ring_roots()


def _is_private(path: Path) -> bool:
    """Returns whether only this user could have read or written the token in *path*."""
    try:
        about = path.lstat()
    except OSError:
        return False
    is_own = stat.S_ISREG(about.st_mode) and about.st_uid == os.getuid()
    return is_own and not about.st_mode & 0o077 and bool(_content(path))


def _content(path: Path) -> str:
    """The token in the file *path*; "" without one. A named pipe is not waited for."""
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="ascii") as file:
            return file.read(_MAX_BYTES).strip()
    return ""


def _make(path: Path) -> None:
    """Makes the file with a new token, unless another process has just made it."""
    made = path.with_name(f".{NAME}.{secrets.token_hex(8)}")
    fd = os.open(made, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_urlsafe(24)}\n")
        try:
            os.link(
                made, path
            )  # unlike a rename, it does not replace what another process has made
        except FileExistsError:
            return
        except OSError:  # a file system without links
            made.replace(path)
    finally:
        made.unlink(missing_ok=True)


CARD, REPORT, REPLY, READ = b"card", b"report", b"reply", b"read"
"""Purposes of signatures: one of a kind does not hold for another."""

TIME, NONCE, SIGNATURE = "X-Zeromon-Time", "X-Zeromon-Nonce", "X-Zeromon-Signature"
"""The headers of a request that carry its proof."""

FRESH_SECONDS = 300.0
"""Clocks of the nodes may differ by so much, and a report may be as old."""

_CARD_SECONDS = 3600.0
_MOST_NONCES = 1 << 18


def signature(token: str, *parts: bytes) -> str:
    """Returns the HMAC of *parts*, in hexadecimal digits; each part counts with its length."""
    made = hmac.new(token.encode(), digestmod="sha256")
    for part in parts:
        made.update(len(part).to_bytes(8, "big"))
        made.update(part)
    return made.hexdigest()


def is_signed(token: str, given: str, *parts: bytes) -> bool:
    """Returns True if *given* is the signature of *parts*, in constant time; never without a token."""
    return bool(token) and hmac.compare_digest(given.encode(), signature(token, *parts).encode())


def signed_card(token: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns *card* with its time and signature; without a token as it is."""
    if not token:
        return dict(card)
    dated = {**card, "signed": time.time()}
    return {**dated, "signature": signature(token, CARD, _canonical(dated))}


def is_own_card(token: str, card: Mapping[str, Any]) -> bool:
    """Returns True if a holder of *token* published *card* within an hour; without a token always."""
    if not token:
        return True
    dated = {name: value for name, value in card.items() if name != "signature"}
    when, given = card.get("signed"), card.get("signature")
    if not isinstance(when, (int, float)) or not isinstance(given, str):
        return False
    fresh = abs(time.time() - when) < _CARD_SECONDS
    return fresh and is_signed(token, given, CARD, _canonical(dated))


def _canonical(card: Mapping[str, Any]) -> bytes:
    return json.dumps(card, sort_keys=True).encode()


class Nonces:
    """The nonces of the last reports: a report that comes a second time is refused."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def is_new(self, nonce: str, when: float) -> bool:
        """Notes the *nonce* of a report of *when*, seconds since the epoch; False if old or known."""
        now = time.time()
        with self._lock:
            while self._seen:
                oldest = next(iter(self._seen))
                if now - self._seen[oldest] < 2 * FRESH_SECONDS and len(self._seen) < _MOST_NONCES:
                    break
                del self._seen[oldest]
            if abs(now - when) > FRESH_SECONDS or not nonce or nonce in self._seen:
                return False
            self._seen[nonce] = now
            return True


def proof_headers(token: str, kind: bytes, content: bytes) -> dict[str, str]:
    """Returns the headers that prove the *content* of a request."""
    when, nonce = repr(time.time()), secrets.token_hex(16)
    proof = signature(token, kind, when.encode(), nonce.encode(), content)
    return {TIME: when, NONCE: nonce, SIGNATURE: proof}


def is_proved(
    headers: Mapping[str, str], kind: bytes, content: bytes, token: str, nonces: Nonces
) -> bool:
    """Returns True if a holder of *token* has sent the *content* just now, for the first time."""
    when, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
    parts = kind, when.encode(), nonce.encode(), content
    if not is_signed(token, headers.get(SIGNATURE, ""), *parts):
        return False
    return nonces.is_new(nonce, float(when))

"""Tokens of the servers, and the private files in which this user's programs find them.

Collector, dashboard and MCP over HTTP answer nobody without a token, also on loopback: every user of a
node reaches its ports. A server takes the *job token* where the user has set one (``ZEROMON_TOKEN``),
which also signs what nodes tell each other, else the *user token*, a
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

from zeromon.base.errors import RingError
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
    if folder and (token := _read_token(Path(folder) / NAME)):
        return token
    return _read_token(Path(environment[TOKEN_FILE])) if environment.get(TOKEN_FILE) else ""


def hand_over_token(environment: MutableMapping[str, str], run_dir: Path) -> None:
    """Moves the job token from *environment* into a private file of the run's folder."""
    token = environment.pop(TOKEN, "")
    if token:
        replace_file(run_dir / NAME, f"{token}\n")


def server_token() -> str:
    """The token of a server that this process starts: the job's where there is one, else the user's."""
    return job_token() or user_token()


def user_token() -> str:
    """The token of this user; one for this process alone where no private file can be made."""
    path = user_token_file()
    return _read_token(path) if path is not None else _unsaved_token()


def user_token_file() -> Path | None:
    """The file with this user's token, made if need be; None where no folder can be written."""
    for folder in _token_folders():
        with suppress(OSError, RingError):
            path = paths.make_private_folder(folder) / NAME
            if not _is_private(path):
                path.unlink(missing_ok=True)
                _make_token_file(path)
            return path
    return None


@cache
def _unsaved_token() -> str:
    return secrets.token_urlsafe(24)


def _token_folders() -> Iterator[Path]:
    """The folders that may have the file: one that outlives a reboot, else those of live runs."""
    state = paths.user_state_folder()
    if state is not None:
        yield state / "zeromon"
    yield from paths.user_ring_roots()


def _is_private(path: Path) -> bool:
    """Returns whether only this user could have read or written the token in *path*."""
    try:
        file_stat = path.lstat()
    except OSError:
        return False
    is_own = stat.S_ISREG(file_stat.st_mode) and file_stat.st_uid == os.getuid()
    return is_own and not file_stat.st_mode & 0o077 and bool(_read_token(path))


def _read_token(path: Path) -> str:
    """The token in the file *path*; "" without one. A named pipe is not waited for."""
    with suppress(OSError, ValueError):
        fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with open(fd, encoding="ascii") as file:
            return file.read(_MAX_BYTES).strip()
    return ""


def _make_token_file(path: Path) -> None:
    """Makes the file with a new token, unless another process has just made it."""
    temporary = path.with_name(f".{NAME}.{secrets.token_hex(8)}")
    fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        with open(fd, "w", encoding="ascii") as file:
            file.write(f"{secrets.token_urlsafe(24)}\n")
        try:
            # Unlike a rename, it does not replace what another process has made
            os.link(temporary, path)
        except FileExistsError:
            return
        except OSError:  # a file system without links
            temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)


CARD, REPORT, REPLY, READ = b"card", b"report", b"reply", b"read"
"""Purposes of signatures: one of a kind does not hold for another."""

TIME, NONCE, SIGNATURE = "X-Zeromon-Time", "X-Zeromon-Nonce", "X-Zeromon-Signature"
"""The headers of a request that carry its proof."""

FRESH_SECONDS = 300.0
"""Clocks of the nodes may differ by so much, and a report may be as old."""

_CARD_SECONDS = 3600.0
_MAX_NONCES = 1 << 18


def signature_of(token: str, *fields: bytes) -> str:
    """Returns the HMAC of *fields*, in hexadecimal digits; each counts with its length."""
    digest = hmac.new(token.encode(), digestmod="sha256")
    # Without the lengths, "ab" and "c" would have the signature of "a" and "bc"
    for field in fields:
        digest.update(len(field).to_bytes(8, "big"))
        digest.update(field)
    return digest.hexdigest()


def has_valid_signature(token: str, given_signature: str, *fields: bytes) -> bool:
    """Returns True if *given_signature* is that of *fields*, in constant time; never without a token."""
    # As bytes: compare_digest() raises for text beyond ASCII, which anybody can send
    return bool(token) and hmac.compare_digest(
        given_signature.encode(), signature_of(token, *fields).encode()
    )


def sign_node_card(token: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns *card* with its time and signature; without a token as it is."""
    if not token:
        return dict(card)
    dated = {**card, "signed": time.time()}
    return {**dated, "signature": signature_of(token, CARD, _canonical_json(dated))}


def is_own_card(token: str, card: Mapping[str, Any]) -> bool:
    """Returns True if a holder of *token* published *card* within an hour; without a token always."""
    if not token:
        return True
    dated = {name: value for name, value in card.items() if name != "signature"}
    signed_at, card_signature = card.get("signed"), card.get("signature")
    if not isinstance(signed_at, (int, float)) or not isinstance(card_signature, str):
        return False
    fresh = abs(time.time() - signed_at) < _CARD_SECONDS
    return fresh and has_valid_signature(token, card_signature, CARD, _canonical_json(dated))


def _canonical_json(card: Mapping[str, Any]) -> bytes:
    return json.dumps(card, sort_keys=True).encode()


class Nonces:
    """The nonces of the last reports: a report that comes a second time is refused."""

    def __init__(self) -> None:
        self._seen: OrderedDict[str, float] = OrderedDict()
        self._lock = threading.Lock()

    def is_new_nonce(self, nonce: str, sent_at: float) -> bool:
        """Notes the *nonce* of a report of *sent_at*, seconds since the epoch; False if old or known."""
        now_seconds = time.time()
        with self._lock:
            while self._seen:
                expiring = next(iter(self._seen))
                # Twice: a report from a clock that is ahead stays fresh for so long
                if (
                    now_seconds - self._seen[expiring] < 2 * FRESH_SECONDS
                    and len(self._seen) < _MAX_NONCES
                ):
                    break
                del self._seen[expiring]
            if abs(now_seconds - sent_at) > FRESH_SECONDS or not nonce or nonce in self._seen:
                return False
            self._seen[nonce] = now_seconds
            return True


def request_proof_headers(token: str, kind: bytes, content: bytes) -> dict[str, str]:
    """Returns the headers that prove the *content* of a request."""
    sent_at, nonce = repr(time.time()), secrets.token_hex(16)
    proof = signature_of(token, kind, sent_at.encode(), nonce.encode(), content)
    return {TIME: sent_at, NONCE: nonce, SIGNATURE: proof}


def is_request_proved(
    headers: Mapping[str, str], kind: bytes, content: bytes, token: str, nonces: Nonces
) -> bool:
    """Returns True if a holder of *token* has sent the *content* just now, for the first time."""
    sent_at, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
    fields = kind, sent_at.encode(), nonce.encode(), content
    if not has_valid_signature(token, headers.get(SIGNATURE, ""), *fields):
        return False
    # After the signature: float() would raise for whatever an unknown client sends
    return nonces.is_new_nonce(nonce, float(sent_at))

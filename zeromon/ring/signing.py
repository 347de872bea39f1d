"""Proof that a message comes from a holder of the job's token, without the token in the message.

The nodes of a job share ``ZEROMON_TOKEN``. What a node publishes in the job's store
(:mod:`zeromon_agents.runtime.rendezvous`) and each report and reply of collectors carry an HMAC-SHA256
(RFC 2104) over their content and the time; a report has a nonce, too, so that it counts once. No message
between nodes contains the token.
"""

import hmac
import json
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Mapping
from typing import Any

CARD, REPORT, REPLY, READ = b"card", b"report", b"reply", b"read"
"""What a signature is for: one of a kind does not hold for another."""

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
    """Whether *given* is the signature of *parts*, in constant time; never without a token."""
    return bool(token) and hmac.compare_digest(given.encode(), signature(token, *parts).encode())


def signed_card(token: str, card: Mapping[str, Any]) -> dict[str, Any]:
    """Returns *card* with its time and signature; without a token as it is."""
    if not token:
        return dict(card)
    dated = {**card, "signed": time.time()}
    return {**dated, "signature": signature(token, CARD, _canonical(dated))}


def is_own_card(token: str, card: Mapping[str, Any]) -> bool:
    """Whether a holder of *token* has published *card* within an hour; without a token always."""
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
    """Whether a holder of *token* has sent the *content* just now, for the first time."""
    when, nonce = headers.get(TIME, ""), headers.get(NONCE, "")
    parts = kind, when.encode(), nonce.encode(), content
    if not is_signed(token, headers.get(SIGNATURE, ""), *parts):
        return False
    return nonces.is_new(nonce, float(when))

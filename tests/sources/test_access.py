"""The one check of requests, with the policies of both servers."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zeromon.collector.http import Application
from zeromon.ring.tokens import user_token
from zeromon.sources.access import Policy, Request, is_loopback_host, is_token, refusal_of
from zeromon_dashboard.access import policy_of


def collector(token: str = "", *, loopback: bool = True) -> Policy:
    return Application(None, token, any_host=not loopback)._policy  # type: ignore[arg-type]


POLICIES = {
    "collector": (collector("secret"), "/api/trace"),
    "dashboard": (policy_of("secret", loopback=True), "/act/trace"),
}


@pytest.mark.parametrize("name", POLICIES)
def test_both_servers_refuse_the_same(name: str) -> None:
    """Foreign hosts and pages, actions without the token or by another method, large bodies."""
    policy, action = POLICIES[name]
    read = Request("GET", "/", "127.0.0.1:1", token="secret")
    act = Request("POST", action, "127.0.0.1:1", token="secret")
    assert refusal_of(read, policy) is None and refusal_of(act, policy) is None
    for request, status in (
        (replace(read, host="evil.example"), 403),
        (replace(read, host=""), 403),
        (replace(read, host="127.0.0.1:x@evil.example"), 403),
        (replace(read, token=""), 401),
        (replace(read, origin="http://evil.example"), 403),
        (replace(act, origin="null"), 403),
        (replace(act, token=""), 401),
        (replace(act, token="secre\u0301t"), 401),
        (replace(act, method="GET"), 405),
        (replace(read, method="DELETE"), 405),
        (replace(act, length=1 << 30), 413),
    ):
        refused = refusal_of(request, policy)
        assert refused is not None and refused.status == status, request


@pytest.mark.parametrize("loopback", [True, False])
def test_reading_needs_the_token_everywhere(loopback: bool) -> None:
    for policy in (collector("secret", loopback=loopback), policy_of("secret", loopback=loopback)):
        request = Request("GET", "/", "127.0.0.1:1")
        assert refusal_of(request, policy) == (401, policy.token_hint)
        assert refusal_of(replace(request, token="secret"), policy) is None


def test_a_server_without_a_token_has_that_of_its_user() -> None:
    assert collector().token == user_token() and len(user_token()) > 20
    assert refusal_of(Request("GET", "/", "127.0.0.1:1"), policy_of("", loopback=True)) is not None


def test_an_action_is_a_path_or_a_folder() -> None:
    """A path that only begins like an action's is none: it stays a read."""
    assert collector().is_action("/api/trace") and not collector().is_action("/api/tracer")
    dashboard = policy_of("secret", loopback=True)
    assert dashboard.is_action("/act/anything") and not dashboard.is_action("/act")


def test_an_empty_token_is_nobodys() -> None:
    assert is_token("a", "a") and not is_token("", "") and not is_token("b", "a")


def test_loopback_addresses() -> None:
    assert [is_loopback_host(h) for h in ("localhost", "127.0.0.9", "::1", "0.0.0.0", "node")] == [
        True, True, True, False, False,
    ]  # fmt: skip

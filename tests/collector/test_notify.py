"""Messages arrive at real servers; slow and broken ones delay nothing, and no secret is told."""

from __future__ import annotations

import json
import time
from pathlib import Path
from urllib.parse import urlsplit, urlunsplit

import pytest
import requests
from builders import rank, run
from receivers import Webhook, mail_server, webhook
from support import free_port, wait_for

from zeromon.base.errors import NotifyError
from zeromon.collector import notify
from zeromon.collector.notify import Notifier, deliver_message, parse_target, split_notify_urls
from zeromon.readout.alerts import Tone, safe_message
from zeromon.ring import paths

EVIL = "ValueError: @everyone <!channel> [x](http://evil) <b>"
HARMLESS = safe_message(Tone.FAILURE, "dying: r\r\nBcc: all@x.org", (EVIL, "second line"))
SECRET = "s3cr3ts3cr3ts3cr3ts3cr3t"
SLACK = f"https://hooks.slack.com/services/T1JJ3T3L2/A1BRTD4JD/{SECRET}"
DISCORD = f"https://discord.com/api/webhooks/4174216298/{SECRET}"
TEAMS = (
    "https://prod-1.westus.logic.azure.com:443/workflows/643e69f83c8944/triggers/manual/paths/invoke"
    f"?api-version=2016-06-01&sp=x&sv=1.0&sig={SECRET}"
)
DEAD = run(rank(0, alive=False, failed=True, ended="SIGKILL"), ended=True)


def notifier(folder: Path, *urls: str) -> Notifier:
    (folder / paths.NOTIFY).write_text(json.dumps([parse_target(url) for url in urls]))
    return Notifier(folder)


def test_a_plain_webhook_gets_the_message_as_json() -> None:
    with webhook() as server:
        assert deliver_message(f"http://127.0.0.1:{server.port}/hook", HARMLESS) == ""
        (request,) = server.requests
    assert request.path == "/hook"
    assert request.json["type"] == "failure"
    assert request.json["title"] == "dying: r??Bcc: all@\u2060x.org"
    assert request.json["message"].endswith("\nsecond line")


def test_mail_goes_through_smtp_and_no_header_is_injected() -> None:
    port = free_port()
    with mail_server(port) as box:
        url = f"mailto://127.0.0.1:{port}?from=zeromon@localhost&to=me@localhost"
        assert deliver_message(url, HARMLESS) == ""
        (mail,) = box.mails
    assert mail["Subject"] == "dying: r??Bcc: all@\u2060x.org"
    assert mail["To"] == "me@localhost" and mail["Bcc"] is None
    body = mail.get_body(("plain", "html"))
    assert body is not None and "second line" in body.get_content()


def test_ntfy_gets_its_protocol() -> None:
    """ntfy's server is no package of PyPI, npm or Debian: its HTTP protocol."""
    with webhook() as server:
        assert deliver_message(f"ntfy://127.0.0.1:{server.port}/runs?priority=high", HARMLESS) == ""
        (request,) = server.requests
    assert request.json["topic"] == "runs"
    assert request.json["message"].endswith("\nsecond line")
    assert request.headers["X-Priority"] == "high"
    assert not any("http" in value for value in request.headers.values())  # no picture from elsewhere


@pytest.fixture
def elsewhere(monkeypatch: pytest.MonkeyPatch) -> Webhook:
    """Requests to any host come to a server here; the first part of the path is that host."""
    send = requests.Session.request
    with webhook() as server:

        def to_here(self: requests.Session, method: str, url: str, **more: object) -> object:
            parts = urlsplit(url)
            here = ("http", f"127.0.0.1:{server.port}", f"/{parts.hostname}{parts.path}")
            return send(self, method, urlunsplit((*here, parts.query, "")), **more)  # type: ignore[arg-type]

        monkeypatch.setattr(requests.Session, "request", to_here)
        yield server  # type: ignore[misc]


@pytest.mark.parametrize(
    ("url", "host", "name"),
    [
        (SLACK, "hooks.slack.com", "https://hooks.slack.com"),
        (DISCORD, "discord.com", "https://discord.com"),
        (TEAMS, "prod-1.westus.logic.azure.com", "https://prod-1.westus.logic.azure.com"),
        (f"ntfys://{SECRET}", "ntfy.sh", "ntfys://"),
        (f"slack://T1JJ3T3L2/A1BRTD4JD/{SECRET}", "hooks.slack.com", "slack://"),
        (f"discord://4174216298/{SECRET}", "discord.com", "discord://"),
    ],
)
def test_chats_get_the_text_and_no_name_of_the_run_is_markup_there(
    elsewhere: Webhook, url: str, host: str, name: str
) -> None:
    """Payloads at a server here: the address is changed where requests sends them."""
    assert parse_target(url).name == name
    assert deliver_message(url, HARMLESS) == ""
    (request,) = elsewhere.requests
    assert request.path.startswith(f"/{host}")
    assert "second line" in request.body
    shown = json.dumps(request.json, ensure_ascii=False)
    assert not [mark for mark in ("@everyone", "@all", "](http", "://evil") if mark in shown]
    assert "slack" not in host or "&lt;!channel&gt;" in shown


def test_who_refuses_is_named_with_the_code_alone(elsewhere: Webhook) -> None:
    elsewhere.status = 403
    assert deliver_message(DISCORD, HARMLESS) == "HTTP 403"


def test_a_slow_server_delays_nothing_and_a_broken_one_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(notify, "_PAUSES", (0.0, 0.1, 0.1))
    with webhook() as server:
        server.pause, server.status = 0.3, 500
        made = notifier(tmp_path, f"json://user:{SECRET}@127.0.0.1:{server.port}/{SECRET}")
        began = time.monotonic()
        made.see(DEAD)
        assert time.monotonic() - began < 0.1
        assert made.is_sending and made.note == ""
        wait_for(lambda: not made.is_sending)
        assert len(server.requests) == 3
    assert made.note == "alerts that json://127.0.0.1 did not accept: 1"


def test_a_restarted_collector_sends_nothing_again(tmp_path: Path) -> None:
    with webhook() as server:
        url = f"json://127.0.0.1:{server.port}"
        for _ in range(2):
            made = notifier(tmp_path, url)
            made.see(DEAD)
            wait_for(lambda made=made: not made.is_sending)
        assert len(server.requests) == 1


def test_what_a_killed_collector_had_not_sent_is_sent_once_if_it_still_stands(tmp_path: Path) -> None:
    """Nobody answers the first one, which waits for its next try."""
    killed = notifier(tmp_path, f"json://127.0.0.1:{free_port()}")
    killed.see(DEAD)
    assert killed.is_sending
    with webhook() as server:
        url = f"json://127.0.0.1:{server.port}"
        over = notifier(tmp_path, url)
        over.see(run(rank(0)))
        assert not over.is_sending
        for _ in range(2):
            made = notifier(tmp_path, url)
            made.see(DEAD)
            wait_for(lambda made=made: not made.is_sending)
        assert len(server.requests) == 1


@pytest.mark.parametrize("content", ["", "{}", "[1]", '[["a"]]', "null"])
def test_a_broken_file_stops_nothing(tmp_path: Path, content: str) -> None:
    for name in (paths.NOTIFY, notify.TOLD):
        (tmp_path / name).write_text(content)
    made = Notifier(tmp_path)
    made.see(DEAD)
    assert not made.is_sending


@pytest.mark.parametrize(
    "url", [f"slakc://{SECRET}", f"slack://{SECRET}", SECRET, f"{SECRET}://x", f"json://[{SECRET}"]
)
def test_a_url_of_no_service_is_refused_without_its_secret(url: str) -> None:
    with pytest.raises(NotifyError) as caught:
        parse_target(url)
    assert SECRET not in caught.value.told


def test_urls_are_separated_by_commas_or_spaces() -> None:
    text = "slack://a/b/c, ntfy://t\n mailto://x?to=a@x,b@x,json://h"
    assert split_notify_urls(text) == ["slack://a/b/c", "ntfy://t", "mailto://x?to=a@x,b@x", "json://h"]

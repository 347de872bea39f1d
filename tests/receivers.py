"""Servers on this machine that receive what zeromon sends: HTTP and SMTP."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from email import message_from_bytes, policy
from email.message import EmailMessage
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ssl import SSLContext
from typing import Any, cast

from aiosmtpd.controller import Controller


@dataclass
class Request:
    """One POST."""

    path: str
    headers: dict[str, str]
    body: str

    @property
    def json(self) -> Any:
        return json.loads(self.body)


@dataclass
class Webhook:
    """An HTTP server that keeps what is posted."""

    status: int = 200
    location: str = ""
    """Where it redirects to."""
    pause: float = 0.0
    requests: list[Request] = field(default_factory=list)
    port: int = 0


@contextmanager
def webhook(host: str = "127.0.0.1", tls: SSLContext | None = None) -> Iterator[Webhook]:
    kept = Webhook()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"])).decode()
            kept.requests.append(Request(self.path, dict(self.headers), body))
            time.sleep(kept.pause)
            self.send_response(kept.status)
            if kept.location:
                self.send_header("Location", kept.location)
            self.end_headers()
            self.wfile.write(b"ok")

        def do_GET(self) -> None:
            kept.requests.append(Request(self.path, dict(self.headers), ""))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    server = ThreadingHTTPServer((host, 0), Handler)
    if tls is not None:
        server.socket = tls.wrap_socket(server.socket, server_side=True)
    kept.port = server.server_port
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    try:
        yield kept
    finally:
        server.shutdown()
        server.server_close()


class Mailbox:
    """What an SMTP server was given."""

    def __init__(self) -> None:
        self.mails: list[EmailMessage] = []

    async def handle_DATA(self, _server: Any, _session: Any, envelope: Any) -> str:
        mail = message_from_bytes(envelope.content, policy=policy.default)
        self.mails.append(cast("EmailMessage", mail))
        return "250 accepted"


@contextmanager
def mail_server(port: int) -> Iterator[Mailbox]:
    box = Mailbox()
    controller = Controller(box, hostname="127.0.0.1", port=port)
    controller.start()
    try:
        yield box
    finally:
        controller.stop()

"""Sends the messages of a run to the services of ``zeromon run --notify``, by apprise.

A service is named by its scheme, and by its host where the URL has one: some URLs have a secret in that
place. Each service has a thread of its own, which alone waits for it.
"""

import importlib
import json
import re
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from zeromon.base.errors import NotifyError, package_install_hint
from zeromon.base.units import printable
from zeromon.readout.alerts import Alerts, Message
from zeromon.ring import paths
from zeromon.ring.files import replace_file
from zeromon.snapshot import RunSnapshot

TOLD = "told.json"
"""The file of a run's folder that has what was told."""
_PAUSES = (0.0, 5.0, 20.0, 60.0)
"""Seconds before each try of a message."""
_SERVICE_SECONDS = 30.0
_SCHEME = re.compile(r"[a-z]{2,12}://", re.IGNORECASE)
_CODE = re.compile(r"error=(\d{3})\b")
_BETWEEN = re.compile(r"\s+|,(?=[A-Za-z][A-Za-z0-9+.-]*://)")


class Target(NamedTuple):
    """Where messages go."""

    name: str
    """Without secrets."""
    url: str


def split_notify_urls(setting: str) -> list[str]:
    """The URLs in ZEROMON_NOTIFY: separated by spaces, or by commas that a scheme follows."""
    return [url for field in _BETWEEN.split(setting) if (url := field.strip(","))]


def parse_target(url: str) -> Target:
    """*url*, once a service is known for it; raises :class:`NotifyError`."""
    services = _apprise_services(url)
    scheme_match = _SCHEME.match(url)
    scheme = scheme_match[0] if scheme_match else ""
    if not services:
        raise NotifyError(f"{scheme or 'the URL'} is no known service, or a part of its URL is missing")
    host = ""
    with suppress(ValueError):
        host = printable(urlsplit(url).hostname or "")
    if not scheme.startswith("http") and any("{host}" not in t for t in services[0].templates):
        host = ""  # a token or a topic may stand there
    return Target(scheme + host, url)


def deliver_message(url: str, message: Message) -> str:
    """Sends *message* to *url*; returns "" when it was accepted, else why not."""
    try:
        tone, body = str(message.tone), message.body
        # As plain text: a chat would read the name of a run as markup
        result = _apprise_services(url).notify(body, message.title, tone, body_format="text")
        if result:
            return ""
        log_text = " ".join(entry.message for service in result for entry in service.logs())
        code = _CODE.search(log_text)  # the rest may hold the URL
        return f"HTTP {code[1]}" if code else "no answer, or none that accepts it"
    except Exception as error:
        return type(error).__name__


def _apprise_services(url: str) -> Any:
    """The Apprise object for *url*: of a web page a plain webhook; empty where it knows no service."""
    try:
        apprise: Any = importlib.import_module("apprise")
    except ImportError as error:
        name = f"alerts need a package that is not installed ({error.name})"
        raise NotifyError(name, package_install_hint("notify")) from error
    pictures = {"image_url_mask": "", "image_url_logo": ""}  # from a host that nobody named
    asset = apprise.AppriseAsset(app_id="zeromon", service_timeout=_SERVICE_SECONDS, **pictures)
    services = apprise.Apprise(asset=asset)
    if not services.add(url) and url.startswith(("http://", "https://")):
        # The plain webhooks of apprise: json:// for http://, jsons:// for https://
        services.add(url.replace("http", "json", 1))
    return services


class _Sender:
    """One service, and the thread that sends to it."""

    def __init__(self, to: Target, done: Callable[[], None]) -> None:
        self.to = to
        self._done = done
        self.failed = 0
        self.is_busy = False
        self._lock = threading.Lock()
        self._waiting: deque[Message] = deque()

    def put(self, messages: list[Message]) -> None:
        """Queues *messages*."""
        with self._lock:
            self._waiting.extend(messages)
            if messages and not self.is_busy:
                self.is_busy = True
                threading.Thread(target=self._send_waiting, name="notify", daemon=True).start()

    def _send_waiting(self) -> None:
        """Sends until nothing waits."""
        while True:
            with self._lock:
                # Under the lock: else put() queues for a thread that has decided to end
                self.is_busy = bool(self._waiting)
                if not self._waiting:
                    break
                message = self._waiting.popleft()
            for pause in _PAUSES:
                time.sleep(pause)
                if not deliver_message(self.to.url, message):
                    break
            else:
                self.failed += 1
        # Outside the lock: see() holds the lock that this takes, and waits for this one
        self._done()


class Notifier:
    """The messages of one run; without a file of URLs it does nothing."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._senders: list[_Sender] = []
        self._alerts = Alerts()
        self._error: list[str] = []
        self._lock = threading.Lock()
        self._told = ""
        """The text that :data:`TOLD` gets once no message waits; a restart sends those that do."""
        with suppress(OSError, ValueError, TypeError):
            listed = json.loads((folder / paths.NOTIFY).read_text())
            self._senders = [_Sender(Target(*map(str, fields)), self._save) for fields in listed]
        with suppress(OSError, ValueError, TypeError, KeyError):
            self._alerts = Alerts(json.loads((folder / TOLD).read_text()))

    def see(self, run: RunSnapshot) -> None:
        """Queues the messages that *run* gives."""
        if not self._senders:
            return
        try:
            messages = self._alerts.observe(run)
            if messages:
                with self._lock:
                    self._told = json.dumps(self._alerts.saved())
                    for sender in self._senders:
                        sender.put(messages)
        except Exception as error:  # the record of a run does not depend on its messages
            self._error = [f"alerts fail: {type(error).__name__}"]

    def _save(self) -> None:
        """Saves what was told, unless a message waits."""
        with self._lock:
            if self._told and not any(sender.is_busy for sender in self._senders):
                with suppress(OSError):  # the folder of a run that has ended is gone
                    replace_file(self._folder / TOLD, self._told)
                self._told = ""

    @property
    def is_sending(self) -> bool:
        """True if a message waits for its service, or is not saved as sent."""
        return bool(self._told) or any(sender.is_busy for sender in self._senders)

    @property
    def note(self) -> str:
        """The messages that were not delivered, and errors; "" for none."""
        unsent = ((sender.to.name, sender.failed) for sender in self._senders if sender.failed)
        failed = [f"alerts that {name} did not accept: {count}" for name, count in unsent]
        return "; ".join([*failed, *self._error])

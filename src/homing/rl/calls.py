"""HTTP calls of tests and checks: one connection each, so that with several workers each call may land at any of them.

Not here: clients that are to be quick (`client.py`).
"""

from __future__ import annotations

import http.client
import json
from dataclasses import dataclass, field
from http.cookies import SimpleCookie
from typing import Any, Final
from urllib.parse import urlsplit

TIMEOUT_SECONDS: Final = 60.0


@dataclass(frozen=True, slots=True)
class Answer:
    """A reply: its status, its headers by lowercase name, and its JSON (None: it has none)."""

    status: int
    headers: dict[str, str]
    content: Any

    @property
    def code(self) -> str | None:
        """What an error reply calls itself."""
        return self.headers.get("homing-error")


@dataclass
class Caller:
    """A client with cookies of its own.

    Attributes:
        url: The server's base URL; a path in it is put before every path.
        cookies: What the server has set.
    """

    url: str
    cookies: dict[str, str] = field(default_factory=dict)
    timeout_seconds: float = TIMEOUT_SECONDS

    def call(
        self,
        method: str,
        path: str,
        content: Any = None,
        *,
        headers: dict[str, str] | None = None,
        raw: bytes | None = None,
        cookies: bool = True,
    ) -> Answer:
        """One request, over a new connection.

        Args:
            content: Sent as JSON. `raw` is sent as it is.
            cookies: Whether to send the cookies, and keep those of the reply.

        Raises:
            OSError, http.client.HTTPException: there was no whole reply.
        """
        target = urlsplit(self.url)
        kind = http.client.HTTPSConnection if target.scheme == "https" else http.client.HTTPConnection
        connection = kind(target.hostname or "", target.port, timeout=self.timeout_seconds)
        sent = dict(headers or {})
        body = raw if raw is not None else None if content is None else json.dumps(content).encode()
        if body is not None:
            sent.setdefault("content-type", "application/json")
        if cookies and self.cookies:
            sent["cookie"] = "; ".join(f"{name}={value}" for name, value in self.cookies.items())
        try:
            connection.request(method, target.path.rstrip("/") + path, body, sent)
            reply = connection.getresponse()
            text = reply.read()
        finally:
            connection.close()
        if cookies:
            for name, value in reply.getheaders():
                if name.lower() == "set-cookie":
                    self.cookies |= {key: morsel.value for key, morsel in SimpleCookie(value).items()}
        try:
            found = json.loads(text) if text else None
        except ValueError:
            found = None
        return Answer(reply.status, {name.lower(): value for name, value in reply.getheaders()}, found)

    def post(self, path: str, content: Any = None, **settings: Any) -> Answer:
        """`call("POST", …)`."""
        return self.call("POST", path, content, **settings)

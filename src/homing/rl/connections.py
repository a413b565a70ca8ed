"""Kept connections to one server, for clients that ask many times: HTTP/1.1, of the standard library.

The invariant: a request that may have been delivered is never sent again. What was closed while it lay idle is seen before
anything is sent, and opened anew.

Not here: what is asked (`client.py`).
"""

from __future__ import annotations

import http.client
import select
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from http.cookies import SimpleCookie
from typing import NamedTuple
from urllib.parse import urlsplit

from homing.errors import ConfigurationError
from homing.rl.errors import RemoteError


class Ask(NamedTuple):
    """One request: `POST` unless it has no body."""

    path: str
    body: bytes | None
    headers: Mapping[str, str]


@dataclass(frozen=True, slots=True)
class Reply:
    """One reply, whole."""

    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def cookies(self) -> dict[str, str]:
        """The cookies that it sets."""
        found: dict[str, str] = {}
        for value in self.headers.get_all("set-cookie") or ():
            found |= {name: morsel.value for name, morsel in SimpleCookie(value).items()}
        return found


class Connection:
    """One connection, opened when it is first used. Owns it. One request at a time: `send`, then `receive`."""

    def __init__(self, url: str, timeout_seconds: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigurationError(f"{url} is no address of a server: write http://host:port")
        kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
        self._url = url
        self._path = parts.path.rstrip("/")
        self._http = kind(parts.hostname, parts.port, timeout=timeout_seconds)

    def send(self, ask: Ask) -> None:
        """Send a request.

        Raises:
            RemoteError: the server cannot be reached, or the connection broke.
        """
        sock = self._http.sock
        if sock is not None and select.select([sock], [], [], 0)[0]:
            # The server has closed it, or said what nobody asked: either way it is of no more use.
            self._http.close()
        try:
            if ask.body is None:
                self._http.request("GET", self._path + ask.path, headers=ask.headers)
            else:
                self._http.request("POST", self._path + ask.path, ask.body, ask.headers)
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise self._broken(error) from error

    def receive(self) -> Reply:
        """The reply to what was sent.

        Raises:
            RemoteError: there was no whole reply: the request may have been handled, or not.
        """
        try:
            reply = self._http.getresponse()
            return Reply(reply.status, reply.headers, reply.read())
        except (OSError, http.client.HTTPException) as error:
            self._http.close()
            raise self._broken(error) from error

    def close(self) -> None:
        """Safe to call twice."""
        self._http.close()

    def _broken(self, error: Exception) -> RemoteError:
        return RemoteError(f"no reply from {self._url}: {type(error).__name__}: {error}", status=None, code=None)


class Connections:
    """At most `size` connections to one server, by name; owns them.

    A name that comes again gets the connection it had: what is asked of one worker stays on one connection.
    """

    def __init__(self, url: str, size: int, timeout_seconds: float) -> None:
        self._url = url
        self.size = size
        self._timeout_seconds = timeout_seconds
        self._named: dict[str, Connection] = {}
        self._spare: list[Connection] = []

    def one(self, name: str) -> Connection:
        """The connection of that name."""
        found = self._named.pop(name, None)
        if found is None:
            if len(self._named) >= self.size:
                # The one that has not been used for longest: workers come and go.
                self._named.pop(next(iter(self._named))).close()
            found = Connection(self._url, self._timeout_seconds)
        self._named[name] = found
        return found

    def each(self, asks: Iterable[Ask]) -> Iterator[Reply]:
        """The replies to many requests, in order, with at most `size` under way.

        Raises:
            RemoteError: one was not answered. What had been sent may have been handled, or not.
        """
        under_way: list[Connection] = []
        waiting = iter(asks)
        try:
            while True:
                for ask in waiting:
                    connection = self._spare.pop() if self._spare else Connection(self._url, self._timeout_seconds)
                    under_way.append(connection)
                    connection.send(ask)
                    if len(under_way) >= self.size:
                        break
                if not under_way:
                    return
                connection = under_way[0]
                reply = connection.receive()
                self._spare.append(under_way.pop(0))
                yield reply
        finally:
            for connection in under_way:
                connection.close()

    def close(self) -> None:
        """Safe to call twice."""
        for connection in (*self._named.values(), *self._spare):
            connection.close()
        self._named.clear()
        self._spare.clear()

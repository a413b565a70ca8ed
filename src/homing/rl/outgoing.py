"""Calls to other servers: JSON in, JSON out, and every failure as one error that says whether a new try may help.

The invariant: a call that may have been delivered is never sent again here. Whether the whole episode is tried again is
its collector's to decide, from `retryable`.

Not here: what is called in which order (`episodes`), and model endpoints, which the official client calls.
"""

from __future__ import annotations

import asyncio
import io
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Final, Self

import aiohttp

from homing.errors import HomingError
from homing.routes import ROLLOUT_PATH_PREFIX

MAX_REPLY_BYTES: Final = 64 * 2**20
KEEP_ALIVE_SECONDS: Final = 2.0
"""Less than any server's own (uvicorn: 5 s), so that no call meets a connection that is just being closed."""

CONNECT_SECONDS: Final = 10.0

SESSION_LOST: Final = "session_lost"
"""The kind of every failure whose cause is a session that died with its worker, or that nobody holds."""

_WRITTEN_AT_ONCE_BYTES: Final = 2**18
"""A longer body is written in parts: all at once, it would hold up the event loop."""

_LOST_CODES: Final = frozenset({"session_gone", "session_lost"})
_RETRYABLE_STATUSES: Final = frozenset({408, 410, 423, 425, 429, 500, 502, 503, 504})
_DETAIL_CHARACTERS: Final = 500


class CallError(HomingError):
    """A call that gave no usable reply.

    Attributes:
        kind: One word of low cardinality: `session_lost`, `connection_error`, `timeout`, `server_unavailable`,
            `server_error`, `bad_reply`, `bad_url`, `rejected`, or the server's own code, such as `seed_rejected`.
        retryable: A new episode may succeed: nothing in the request itself is at fault.
        status: Of the reply; None if there was none.
        said: The server's own sentence; empty if it said none.
    """

    def __init__(self, kind: str, detail: str, *, retryable: bool, status: int | None = None, said: str = "") -> None:
        super().__init__(detail)
        self.said = said
        self.kind = kind
        self.detail = detail
        self.retryable = retryable
        self.status = status


@dataclass(slots=True)
class Cookies:
    """The cookies that one server has set for one session; later calls carry them. No domains: one server, one jar."""

    values: dict[str, str] = field(default_factory=dict)

    def header(self) -> dict[str, str]:
        if not self.values:
            return {}
        return {"cookie": "; ".join(f"{name}={value}" for name, value in self.values.items())}

    def take(self, reply: aiohttp.ClientResponse) -> None:
        for name, morsel in reply.cookies.items():
            if morsel["max-age"] == "0" or (not morsel.value and morsel["expires"]):
                self.values.pop(name, None)
            else:
                # As it was written: a server compares a signed cookie byte for byte.
                self.values[name] = morsel.coded_value

    def __bool__(self) -> bool:
        return bool(self.values)


class OutgoingCalls:
    """One pool of connections for all calls of a process. An async context manager, used on one event loop.

    Args:
        new_connection_per_call: Keep no connection open: each call may land on another worker.
        max_reply_bytes: A longer reply is refused.
    """

    def __init__(self, *, new_connection_per_call: bool = False, max_reply_bytes: int = MAX_REPLY_BYTES) -> None:
        self._fresh = new_connection_per_call
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None

    async def __aenter__(self) -> Self:
        if self._fresh:
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
        else:
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_SECONDS)
        self._session = aiohttp.ClientSession(
            connector=connector,
            cookie_jar=aiohttp.DummyCookieJar(),
            # Each call has its own limit: the whole of it, however its bytes trickle.
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=CONNECT_SECONDS),
        )
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Close every connection; calls under way end. Safe to call twice."""
        session, self._session = self._session, None
        if session is not None:
            await session.close()

    async def post(
        self,
        url: str,
        body: Any,
        *,
        timeout_seconds: float | None,
        cookies: Cookies | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Any:
        """The reply's JSON.

        Args:
            cookies: Sent, and changed by what the reply sets.
            timeout_seconds: For the whole call; None: as long as it takes.

        Raises:
            CallError: no reply, no 2xx, or no JSON.
        """
        return await self._call("POST", url, body, timeout_seconds, cookies, headers)

    async def get(self, url: str, *, timeout_seconds: float | None) -> Any:
        """As `post`, without a body."""
        return await self._call("GET", url, None, timeout_seconds, None, None)

    async def _call(
        self,
        method: str,
        url: str,
        body: Any,
        timeout_seconds: float | None,
        cookies: Cookies | None,
        headers: Mapping[str, str] | None,
    ) -> Any:
        if self._session is None:
            raise RuntimeError("a OutgoingCalls is used inside its `async with`")
        sent = {**(headers or {}), **(cookies.header() if cookies else {})}
        data: bytes | io.BytesIO | None = None
        if method == "POST":
            data = json.dumps(body, separators=(",", ":")).encode()
            if len(data) > _WRITTEN_AT_ONCE_BYTES:
                data = io.BytesIO(data)
            sent["content-type"] = "application/json"
        try:
            async with (
                asyncio.timeout(timeout_seconds),
                self._session.request(method, url, data=data, headers=sent, allow_redirects=False) as reply,
            ):
                raw = await self._read(reply)
        except TimeoutError as error:
            # aiohttp's own connect timeout is one of these too.
            raise CallError("timeout", f"{_where(url)} did not answer in time", retryable=True) from error
        except aiohttp.InvalidURL as error:
            raise CallError("bad_url", f"{_where(url)} is no URL", retryable=False) from error
        except aiohttp.ClientError as error:
            raise CallError(
                "connection_error", f"{_where(url)}: {type(error).__name__}: {error}", retryable=True
            ) from error
        document = _json(raw)
        if not 200 <= reply.status < 300:
            raise refused(url, reply.status, reply.headers.get("homing-error"), document, raw)
        if document is _NO_JSON:
            raise CallError(
                "bad_reply", f"{_where(url)} answered {reply.status} without JSON", retryable=False, status=reply.status
            )
        if cookies is not None:
            cookies.take(reply)
        return document

    async def _read(self, reply: aiohttp.ClientResponse) -> bytes:
        parts = []
        left = self._max_reply_bytes
        async for part in reply.content.iter_chunked(2**16):
            left -= len(part)
            if left < 0:
                raise CallError(
                    "bad_reply",
                    f"{_where(str(reply.url))} answered with more than {self._max_reply_bytes} bytes",
                    retryable=False,
                    status=reply.status,
                )
            parts.append(part)
        return b"".join(parts)


def under_rollout(base_url: str, capture_key: str | None) -> str:
    """The address of a server for the calls of one rollout: `/ng-rollout/<key>` below its base."""
    base = base_url.rstrip("/")
    return base if capture_key is None else f"{base}/{ROLLOUT_PATH_PREFIX}/{capture_key}"


def refused(url: str, status: int, homing_error: str | None, document: Any, raw: bytes) -> CallError:
    """The error that a reply with a status other than 2xx stands for.

    The server's own word comes first: `error.code` and `error.retryable` of its JSON, or the header that homing sets.
    """
    said = document.get("error") if isinstance(document, dict) else None
    code, detail, retryable = homing_error, "", None
    if isinstance(said, dict):
        code = said["code"] if isinstance(said.get("code"), str) else code
        detail = said["detail"] if isinstance(said.get("detail"), str) else ""
        retryable = said["retryable"] if isinstance(said.get("retryable"), bool) else None
    if not detail:
        detail = raw[:_DETAIL_CHARACTERS].decode("utf-8", "replace")
    if code in _LOST_CODES or status == 410:
        kind, retryable = SESSION_LOST, True
    elif said is not None and retryable is not None and code:
        kind = code  # a server that says both knows best
    elif status == 500:
        kind = "server_error"
    elif status in _RETRYABLE_STATUSES:
        kind = "server_unavailable"
    else:
        kind = code or "rejected"
    if retryable is None:
        retryable = status in _RETRYABLE_STATUSES
    text = f"{_where(url)} answered {status}: {detail}"[: 4 * _DETAIL_CHARACTERS]
    return CallError(kind, text, retryable=retryable, status=status, said=detail)


_NO_JSON: Final = object()


def _json(raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except ValueError:
        return _NO_JSON


def _where(url: str) -> str:
    """A URL for people: without a query, which may hold what should not be in a log."""
    return url.partition("?")[0]

"""What does a signed session cookie say? Exactly what the app's own `SessionMiddleware` reads from it.

The router's verdict on a cookie must be the app's: a cookie that only one of them accepts would route a request to one
session and run it against another. So the parser equals Starlette's, the signature and the age are judged by
itsdangerous itself, the boundary of the age included, and a cookie over which the middleware would fail names no
session: the app fails by itself. `tests/contract/test_cookie.py` holds the two together. Starlette is not imported.

Not here: which cookie matters (`sources`, `kinds`), and ever writing one.
"""

from __future__ import annotations

import json
import logging
import math
from base64 import b64decode
from collections.abc import Iterable, Sequence
from http.cookies import _unquote
from typing import Any, Final, TypeAlias

from itsdangerous import BadSignature, Signer, TimestampSigner
from itsdangerous.encoding import base64_decode, bytes_to_int

from homing.clock import SYSTEM_CLOCK, Clock
from homing.identity.ids import header_text

logger = logging.getLogger(__name__)

SESSION_MAX_AGE_SECONDS: Final = 14 * 24 * 60 * 60
"""How long a session cookie is good for, in seconds: Starlette's default."""

_REMEMBERED_COOKIES: Final = 4096
_REMEMBERED_COOKIE_BYTES: Final = 4096
_REMEMBERED_BYTES: Final = 2 * 1024 * 1024


class ClockedSigner(TimestampSigner):
    """A `TimestampSigner` that reads the wall clock it was given; its signatures are those of the class itself."""

    def __init__(self, secret_key: str, clock: Clock = SYSTEM_CLOCK) -> None:
        super().__init__(secret_key)
        self._clock = clock

    def get_timestamp(self) -> int:
        return int(self._clock.wall())


def cookie_session(
    cookie: str, signer: TimestampSigner, *, max_age_seconds: int | None = SESSION_MAX_AGE_SECONDS
) -> dict[str, Any] | None:
    """The session stored in a signed cookie; None where the session middleware would reject it, or fail over it.

    Args:
        cookie: `base64(JSON object) "." timestamp "." signature`, as the middleware writes it.
        signer: Made from the middleware's secret. Its `get_timestamp` is the present.
        max_age_seconds: A cookie that is older than this, or of the future, is rejected; exactly this old is good.
            None: any.

    Raises:
        Nothing for bad input: a cookie is a client's, so a bad one means "no session".

    Source: Starlette's `SessionMiddleware`; `tests/contract/test_cookie.py` holds the two together.
    """
    try:
        payload = signer.unsign(cookie.encode("utf-8", "surrogatepass"), max_age=max_age_seconds)
        # `dict(...)`: the middleware's Session is a dict made from whatever the JSON is, so a list of pairs passes
        # there too.
        return dict(json.loads(b64decode(payload)))
    except (BadSignature, ValueError, TypeError, OverflowError, OSError, RecursionError):
        # Beyond BadSignature: validly signed, and not base64, not JSON, no object, or a timestamp no calendar has. The
        # middleware raises, so the app answers 500 by itself, wherever the request is served.
        return None


def parse_cookies(header: str) -> dict[str, str]:
    """The cookies of one `Cookie` header, decoded as Latin-1; of two with one name the later counts.

    Equal to Starlette's `cookie_parser` on every text: quoted values are unquoted, a chunk without `=` is a value
    without a name, and white space around names and values is removed.
    """
    cookies: dict[str, str] = {}
    for chunk in header.split(";"):
        name, equals, value = chunk.partition("=")
        if not equals:
            name, value = "", name
        name, value = name.strip(), value.strip()
        if name or value:
            cookies[name] = _unquote(value)
    return cookies


def cookie_value(name: str, headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The value of one cookie in raw headers, as `Request.cookies` gives it: decoded as Latin-1; None if there is none.

    Of two cookies with one name, in one `Cookie` header or in several, the later counts.
    """
    value = None
    name_bytes = name.encode("latin-1", "replace")
    for key, header in headers:
        if key == b"cookie" and name_bytes in header:
            found = parse_cookies(header.decode("latin-1")).get(name)
            value = value if found is None else found
    return value


def cookie_text(value: str) -> str:
    """A cookie's value as text: the bytes the client sent, read as a header's."""
    return value if value.isascii() else header_text(value.encode("latin-1", "replace"))


_Known: TypeAlias = tuple[float, float, str | None]
"""From when and until when a good cookie is good, and the session ID in it."""


class SignedCookieReader:
    """Reads one key of a signed session cookie from raw headers, and remembers a bounded number of good ones.

    A cookie is remembered by its whole `Cookie` header, with the instant it was signed at, and its age is judged anew
    each time. Bad cookies are not remembered, so they cannot push out good ones. Once half of the room is used, only what
    is seen again from then on is kept: a worker with a few thousand sessions under way still finds nearly all.

    Args:
        name: The cookie.
        key: The key of the session in it that holds the session ID.
        secret: The session middleware's secret.
        max_age_seconds: As the middleware's `max_age`.
        clock: Whose wall clock ages the cookies.
    """

    def __init__(
        self,
        name: str,
        key: str,
        secret: str,
        *,
        max_age_seconds: int | None = SESSION_MAX_AGE_SECONDS,
        clock: Clock = SYSTEM_CLOCK,
    ) -> None:
        self._name = name
        self._name_bytes = name.encode("latin-1", "replace")
        self._key = key
        self._signer = ClockedSigner(secret, clock)
        self._max_age_seconds = max_age_seconds
        self._wall = clock.wall
        self._good: dict[bytes, _Known] = {}
        self._older: dict[bytes, _Known] = {}
        self._bytes = 0
        self._told = False

    def read(self, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """The session ID in the request's cookie; None if there is no such cookie, it is rejected, or it holds none."""
        return self.read_head(None, headers)

    def read_head(self, scope: object, headers: Sequence[tuple[bytes, bytes]]) -> str | None:
        """As `read`; takes a head as every source's reader does."""
        header, name = None, self._name_bytes
        for key, each in headers:
            # Not `name in each`: that first takes the name for a number, and an exception is made and dropped each time.
            if key == b"cookie" and each.find(name) >= 0:
                if header is not None:
                    value = cookie_value(self._name, headers)
                    if value is None:
                        return None
                    if (session := cookie_session(value, self._signer, max_age_seconds=self._max_age_seconds)) is None:
                        self._rejected(value)
                        return None
                    return self._text(session)
                header = each
        if header is None:
            return None
        known = self._good.get(header) or self._recall(header)
        if known is not None:
            signed_at, over_at, session_id = known
            if signed_at <= self._wall() < over_at:
                return session_id
            del self._good[header]
            self._bytes -= len(header)
            return None
        value = parse_cookies(header.decode("latin-1")).get(self._name)
        if value is None:
            return None
        session = cookie_session(value, self._signer, max_age_seconds=self._max_age_seconds)
        if session is None:
            self._rejected(value)
            return None
        session_id = self._text(session)
        self._remember(header, (*self._good_between(value), session_id))
        return session_id

    def _good_between(self, value: str) -> tuple[float, float]:
        """From when to when, on the wall clock, a cookie that was just accepted is good: in whole seconds of age."""
        if self._max_age_seconds is None:
            return -math.inf, math.inf
        signed_at = _signed_at(value)
        return signed_at, signed_at + self._max_age_seconds + 1

    def _rejected(self, value: str) -> None:
        """Say once that a request's cookie was signed with another secret: one that is only too old is no news."""
        if self._told:
            return
        try:
            Signer.unsign(self._signer, value.encode("utf-8", "surrogatepass"))
        except BadSignature:
            self._told = True
            logger.warning(
                "the cookie %r is present, but its signature does not match: is --secret-env (in code: secret=) the "
                "app's secret?",
                self._name,
            )

    def _recall(self, header: bytes) -> _Known | None:
        known = self._older.pop(header, None)
        if known is not None:
            self._remember(header, known)
        return known

    def _remember(self, header: bytes, known: _Known) -> None:
        if len(header) > _REMEMBERED_COOKIE_BYTES:
            return
        if len(self._good) >= _REMEMBERED_COOKIES // 2 or self._bytes + len(header) > _REMEMBERED_BYTES // 2:
            self._older, self._good, self._bytes = self._good, {}, 0
        self._good[header] = known
        self._bytes += len(header)

    def session_id(self, value: str) -> str | None:
        """The session ID in one cookie's value; None if the cookie is rejected or holds none."""
        session = cookie_session(value, self._signer, max_age_seconds=self._max_age_seconds)
        return None if session is None else self._text(session)

    def __len__(self) -> int:
        """How many good cookies are remembered."""
        return len(self._good) + len(self._older)

    def __repr__(self) -> str:
        return f"<SignedCookieReader {self._name}:{self._key}: {len(self)} remembered>"

    def _text(self, session: dict[str, Any]) -> str | None:
        found = session.get(self._key)
        return found if isinstance(found, str) and found else None


def _signed_at(value: str) -> int:
    """When a cookie that was just accepted was signed, in seconds since the epoch."""
    return bytes_to_int(base64_decode(value.rsplit(".", 2)[1]))

"""Which values does a reply give a cookie?

Source: RFC 6265, 5.2: attributes after the first `;`; `Max-Age` wins over `Expires`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from email.utils import parsedate_to_datetime
from typing import Final

from homing.clock import Clock
from homing.identity.cookie import parse_cookies

SET_COOKIE: Final = b"set-cookie"


def cookies_set(name: str, headers: Iterable[tuple[bytes, bytes]], clock: Clock) -> Sequence[str]:
    """The values that a reply's `Set-Cookie` headers give the cookie `name`, decoded as Latin-1, as it will come back.

    A cookie that is set to nothing, or whose life is over, is deleted by that, and gives no value.
    """
    set_cookies = [header for key, header in headers if key.lower() == SET_COOKIE]
    if not set_cookies:
        return ()  # most replies
    values: list[str] = []
    for header in set_cookies:
        pair, *attributes = header.decode("latin-1").split(";")
        value = parse_cookies(pair).get(name)
        if value and not _over(attributes, clock):
            values.append(value)
    return values


def _over(attributes: list[str], clock: Clock) -> bool:
    expired = False
    for attribute in attributes:
        key, _, value = attribute.partition("=")
        key, value = key.strip().lower(), value.strip()
        if key == "max-age":
            digits = value.removeprefix("-")
            if digits.isascii() and digits.isdigit():
                return value.startswith("-") or not digits.strip("0")
        elif key == "expires":
            try:
                expired = parsedate_to_datetime(value).timestamp() <= clock.wall()
            except (ValueError, OverflowError):
                expired = False
    return expired

"""What does a JSON document say in one field?

More lenient than any parser an app may use (a byte order mark, UTF-16, NaN, lone surrogates and huge numbers all pass),
since a document that the app reads and the router does not would be run against another session; and stricter in one
thing: an object on the way to the field that has its key twice is an error, since two parsers may pick different ones.

Not here: where documents come from (`body`, `learned`), and whether a name that was found is a good session ID.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any, Final, TypeAlias

from homing.errors import BadRequestError, DuplicateFieldError

Json: TypeAlias = Any
"""Parsed JSON: dict, list, str, number, bool or None."""

NOT_JSON: Final = object()
"""What `parse_document` returns for bytes that are no JSON document. No field is in it."""

_LEADING: Final = b" \t\r\n\x00\xef\xbb\xbf\xff\xfe"


class _Doubled(dict[str, Json]):
    """An object with keys that occur more than once, of those that matter."""

    doubled: frozenset[str] = frozenset()


def opens_a_document(head: bytes) -> bool | None:
    """Whether bytes that begin so can be a JSON object or list, in any encoding JSON may have; None if it is too early
    to say.
    """
    rest = head.lstrip(_LEADING)
    return rest[:1] in (b"{", b"[") if rest else None


def parse_document(body: bytes, keys: frozenset[str]) -> Json:
    """The JSON document in `body`, or `NOT_JSON`. Objects in it remember which of `keys` they had twice.

    Raises:
        BadRequestError: it is nested too deeply to be read, so a field in it could be missed.
    """
    try:
        text = body.decode(json.detect_encoding(body), "surrogatepass").removeprefix("\ufeff")
        if _at_most_once(text, keys):
            return json.loads(text, parse_int=_number, parse_float=_number)
        return json.loads(text, parse_int=_number, parse_float=_number, object_pairs_hook=_watch(keys))
    except RecursionError:
        raise BadRequestError("a JSON body is nested too deeply to look for a session in it") from None
    except ValueError:
        return NOT_JSON


def field(document: Json, path: tuple[str, ...]) -> Json:
    """What is in the field `a.b` of the document, given as `("a", "b")`; None if there is no such field.

    Raises:
        DuplicateFieldError: one of the path's keys occurs twice in its object.
    """
    for key in path:
        if not isinstance(document, dict):
            return None
        if isinstance(document, _Doubled) and key in document.doubled:
            raise DuplicateFieldError(f"the field {'.'.join(path)!r} of a JSON body occurs twice")
        document = document.get(key)
    return document


def field_text(document: Json, path: tuple[str, ...]) -> str | None:
    """As `field`, where it holds a string that is not empty; None otherwise.

    Raises:
        DuplicateFieldError: as `field`.
    """
    found = field(document, path)
    return found if isinstance(found, str) and found else None


def may_hold(data: bytes | bytearray, keys: Iterable[str]) -> bool:
    """Whether a UTF-8 document that consists of `data` may have one of `keys`: cheap, and never wrongly no."""
    if b"\\u" in data or b"\x00" in data:
        return True
    return any(not _plain(key) or f'"{key}"'.encode("utf-8", "surrogatepass") in data for key in keys)


def _at_most_once(text: str, keys: frozenset[str]) -> bool:
    """Whether no key can occur twice: none does as a plain string, and none can hide behind an escape."""
    return not keys or ("\\u" not in text and all(_plain(key) and text.count(f'"{key}"') <= 1 for key in keys))


def _plain(key: str) -> bool:
    """Whether JSON can write the key in one way only, `\\u` aside."""
    return key.isprintable() and "/" not in key and '"' not in key and "\\" not in key


def _watch(keys: frozenset[str]) -> Any:
    def pairs(found: list[tuple[str, Json]]) -> dict[str, Json]:
        plain = dict(found)
        if len(plain) == len(found):
            return plain
        doubled = {key for key in keys if sum(name == key for name, _ in found) > 1}
        if not doubled:
            return plain
        watched = _Doubled(plain)
        watched.doubled = frozenset(doubled)
        return watched

    return pairs


def _number(text: str) -> int:
    # No number is ever a session ID, and converting one of a million digits takes seconds (or is refused, unlike in the
    # app).
    return 0

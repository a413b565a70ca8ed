"""Where does one server-sent event of a stream end, and what data does it hold?

The stream is cut at the ends of its events and nowhere else, wherever the parts it comes in are cut: no byte is added,
dropped or changed. An event that is longer than the limit is passed on in pieces, unread.

Source: WHATWG HTML, 9.2 "Server-sent events": lines end in CR LF, LF or CR; a blank line ends an event; several `data`
    lines
are joined by LF; one space after the colon is not part of the value.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

_LINE_END: Final = re.compile(rb"\r\n|\n|\r")
_EVENT_END: Final = re.compile(rb"(?:\r\n|\n|\r(?!\n))(?:\r\n|\n|\r)")


@dataclass(frozen=True, slots=True)
class Event:
    """One server-sent event: its `event` field, empty if it has none, and its data."""

    kind: str
    data: bytes


class EventSplitter:
    """Cuts a stream of server-sent events at their ends. One per reply.

    Args:
        max_event_bytes: The longest event that is held back.
    """

    def __init__(self, max_event_bytes: int) -> None:
        self._max_event_bytes = max_event_bytes
        self._held = bytearray()
        self._searched = 0
        self._passing = False
        self._ended_with_cr = False

    def feed(self, part: bytes) -> tuple[bytes, list[Event]]:
        """Take the next part of the stream; return the bytes that may leave now, and the events that end in them."""
        passed = b""
        if self._ended_with_cr and part:
            # The LF of a CR LF that was cut in two belongs to the blank line before it.
            self._ended_with_cr = False
            if part[:1] == b"\n":
                passed, part = b"\n", part[1:]
        self._held += part
        events: list[Event] = []
        end = 0
        for boundary in _EVENT_END.finditer(self._held, self._searched):
            if not self._passing:
                events += parse_events(bytes(self._held[end : boundary.end()]))
            self._passing = False
            end = boundary.end()
        if not self._passing:
            if not self._held[end:].strip(b"\r\n"):
                end = len(
                    self._held
                )  # Blank lines between events hold nothing; some servers send them to keep a line alive.
            self._passing = len(self._held) - end > self._max_event_bytes
        if end and end == len(self._held):
            self._ended_with_cr = self._held[-1:] == b"\r"
        if self._passing and len(self._held) - end > 3:
            # Too long to hold back. The last bytes stay, so that an end that is cut in two is still seen.
            end = len(self._held) - 3
        passed += bytes(self._held[:end])
        del self._held[:end]
        self._searched = max(0, len(self._held) - 3)
        return passed, events

    def finish(self) -> tuple[bytes, list[Event]]:
        """The stream ended: the bytes still held back, and the event in them although no blank line ended it."""
        rest = bytes(self._held)
        self._held.clear()
        # A browser drops an event that was cut off; other clients do not.
        return rest, [] if self._passing else parse_events(rest)


def parse_events(block: bytes) -> list[Event]:
    """The events in a block of lines that ends where an event ends; those without data are left out."""
    events: list[Event] = []
    kind, seen = "", False
    data: list[bytes] = []
    for line in [*_LINE_END.split(block.removeprefix(b"\xef\xbb\xbf")), b""]:
        if not line:
            if seen:
                events.append(Event(kind, b"\n".join(data)))
            kind, data, seen = "", [], False
            continue
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if name == b"data":
            data.append(value)
            seen = True
        elif name == b"event":
            kind = value.decode("utf-8", "replace")
    return events

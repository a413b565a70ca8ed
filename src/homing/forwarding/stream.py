"""A connection of the hop: frames in, frames out, and back-pressure both ways.

Invariant: back-pressure is the socket's own. What has arrived and was not taken is at most `READ_AHEAD_BYTES`, one read
and one frame, since reading is paused beyond that; what was written and not sent is at most the transport's high-water
mark and one frame, since every writer waits for `writable` first.

Not here: what frames mean, and who writes which (`forwarder.py`, `receiver.py`); many exchanges on one connection (`numbered.py`).
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final, cast

from homing.errors import HomingError
from homing.forwarding.frames import MAX_PAYLOAD_BYTES, PREFIX, PREFIX_BYTES
from homing.forwarding.values import MalformedFrameError
from homing.rundir import close_after_fork

logger = logging.getLogger(__name__)

READ_AHEAD_BYTES: Final = 64 * 1024
FRAME_COST_BYTES: Final = 256
"""What a waiting frame counts beyond its payload, so that many empty ones are bounded too."""

_JOINED_BYTES: Final = 64 * 1024
"""Up to this size prefix, head and payload are joined for one write; a larger payload is written uncopied."""


class UndeliveredError(HomingError):
    """A request was provably not read in full: its write failed, or the other end closed with bytes unread."""


class Stream(asyncio.Protocol):
    """A connection between two workers, for as long as it lives. A subclass reads, and says what the end means (`ended`)."""

    def __init__(self) -> None:
        self.transport = cast(asyncio.Transport, None)
        self.lost = False
        """Nothing can be written any more, nor will anything more arrive."""
        self.error: Exception | None = None
        """Why the connection was lost; None for an orderly end."""
        self.write_paused = False
        self._writable: asyncio.Event | None = None
        self.read_paused = False
        self._rest = b""
        """What has arrived of a frame whose end is to come."""

    def ended(self) -> None:
        """The connection is lost; `error` says why."""
        raise NotImplementedError

    def malformed(self) -> None:
        """The other end sent something that is no frame; the connection is about to be aborted."""

    def refuse(self, error: MalformedFrameError) -> None:
        """Close the connection: the other end does not speak this protocol."""
        logger.error("closed a connection between workers: %s", error)
        self.malformed()
        self.abort(error)

    @property
    def unsent(self) -> bool:
        """A part of what was written is still here."""
        return not self.lost and self.transport.get_write_buffer_size() > 0

    def pause_reading(self) -> None:
        if not self.read_paused and not self.lost:
            self.read_paused = True
            self.transport.pause_reading()

    def resume_reading(self) -> None:
        if self.read_paused and not self.lost:
            self.read_paused = False
            self.transport.resume_reading()

    async def writable(self) -> None:
        """Wait until the other end has taken enough of what was written, or the connection is lost."""
        while self.write_paused and not self.lost:
            if self._writable is None:
                self._writable = asyncio.Event()
            await self._writable.wait()

    def pause_writing(self) -> None:
        self.write_paused = True
        if self._writable is not None:
            self._writable.clear()

    def resume_writing(self) -> None:
        self.write_paused = False
        if self._writable is not None:
            self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast(asyncio.Transport, transport)
        # A child that the app forks would keep the connection open when this worker is dead, and the other end waiting.
        self._undo_close_after_fork = close_after_fork(transport.get_extra_info("socket").fileno())

    def connection_lost(self, exc: Exception | None) -> None:
        self._undo_close_after_fork()
        if not self.lost:
            self._lose(exc)

    def abort(self, error: Exception | None = None) -> None:
        """Drop the connection at once, with all that was not sent. Safe to call twice."""
        if not self.lost:
            self.transport.abort()
            self._lose(error)

    def _lose(self, error: Exception | None) -> None:
        self.lost = True
        self.error = error
        self._rest = b""
        self.resume_writing()
        self.ended()


class FrameStream(Stream):
    """A connection that carries one exchange at a time. A subclass says what to do with a frame (`frame_received`)."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[bytes] = []
        self._missing = 0
        self._part_of = (0, b"")

    def frame_received(self, kind: int, head: bytes, payload: bytes) -> None:
        raise NotImplementedError

    # --- reading ---

    @property
    def inside_a_frame(self) -> bool:
        """A part of a frame has arrived, and the rest is to come."""
        return bool(self._missing or self._rest)

    def data_received(self, data: bytes) -> None:
        try:
            size = len(data)
            position = 0
            # Mostly one frame arrives, and all of it at once.
            if not (self._missing or self._rest or self.lost or size < PREFIX_BYTES):
                prefix, payload_size = PREFIX.unpack_from(data)
                middle = PREFIX_BYTES + (prefix >> 8)
                if middle + payload_size == size:
                    self.frame_received(prefix & 0xFF, data[PREFIX_BYTES:middle], data[middle:])
                    return
            if self._missing:
                if size < self._missing:
                    self._parts.append(data)
                    self._missing -= size
                    return
                position = self._end_payload(data)
            elif self._rest:
                data = self._rest + data
                size = len(data)
                self._rest = b""
            while size - position >= PREFIX_BYTES and not self.lost:
                prefix, payload_size = PREFIX.unpack_from(data, position)
                start = position + PREFIX_BYTES
                middle = start + (prefix >> 8)
                end = middle + payload_size
                if end <= size:
                    self.frame_received(prefix & 0xFF, data[start:middle], data[middle:end])
                    position = end
                    continue
                if payload_size > MAX_PAYLOAD_BYTES:
                    raise MalformedFrameError(f"a payload of {payload_size} bytes is over the limit")  # noqa: TRY301
                if middle > size:
                    break
                self._part_of = (prefix & 0xFF, data[start:middle])
                self._parts = [data[middle:]]
                self._missing = end - size
                return
            if position < size:
                self._rest = data[position:] if position else data
        except MalformedFrameError as error:
            self.refuse(error)

    def _end_payload(self, data: bytes) -> int:
        """Take the last of a payload that came in parts, each copied once; returns where in `data` it ended."""
        position = self._missing
        self._parts.append(data if len(data) == position else data[:position])
        payload = b"".join(self._parts)
        self._parts = []
        self._missing = 0
        kind, head = self._part_of
        self.frame_received(kind, head, payload)
        return position

    # --- writing ---

    def write(self, kind: int, head: bytes = b"", payload: bytes = b"") -> bool:
        """Write one frame; False if the connection has ended, and nothing of the frame was written."""
        if self.lost or self.transport.is_closing():
            return False
        size = len(payload)
        prefix = PREFIX.pack(kind | len(head) << 8, size)
        if size <= _JOINED_BYTES:
            self.transport.write(b"".join((prefix, head, payload)))
        else:
            self.transport.write(prefix + head)
            self.transport.write(payload)
        return True

    def _lose(self, error: Exception | None) -> None:
        self._parts = []
        self._missing = 0
        super()._lose(error)

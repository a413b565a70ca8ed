"""A connection of the hop that many small exchanges share: each frame says by a number of which it is.

What one turn of the event loop sends leaves as one batch, in one write, and wakes the other worker once. That is what it is
for: where many requests are under way, a write, a read and a wake-up for each cost as much as all the rest of its way.

Invariant: nothing on it waits for a client. A request here has no body, and a reply is whole and small; what turns out
otherwise goes on over a connection of its own (`CALL`, `JOIN`). So no exchange holds up another.

Invariant: nothing of a batch is used before all of it has been read. So a batch whose end is unread has had no effect.

A batch is its size in 4 bytes, and frames. A frame is a prefix of 12 bytes, a head and a payload: 8 bits of kind, 24 bits of
head size, 32 bits of payload size, 32 bits of number. All little-endian. The numbers of requests rise.

Not here: the two ends (`shared.py`, `shared_peer.py`).
"""

from __future__ import annotations

import asyncio
import struct
from typing import Final

from homing.forwarding.stream import Stream
from homing.forwarding.values import MalformedFrameError

SMALL_BYTES: Final = 64 * 1024
"""How large the head and the payload of a reply's frame may be together."""

MAX_BATCH_BYTES: Final = 2**30

_LARGE_BATCH_BYTES: Final = 256 * 1024
"""A batch of this size is written before the turn ends: the writers see at once whether the other end takes it, and it is read in
few parts."""

_SIZE: Final = struct.Struct("<I")
_PREFIX: Final = struct.Struct("<III")


class NumberedStream(Stream):
    """One end of such a connection. A subclass says what to do with a frame (`frame_received`)."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        super().__init__()
        self.loop = loop
        self._batch: list[bytes] = []
        self._batch_bytes = 0

    def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
        raise NotImplementedError

    def put(self, kind: int, number: int, head: bytes = b"", payload: bytes = b"") -> None:
        """Send a frame, with the others of this turn of the event loop."""
        batch = self._batch
        if not batch:
            self.loop.call_soon(self.flush)
        batch.append(_PREFIX.pack(kind | len(head) << 8, len(payload), number))
        batch.append(head)
        batch.append(payload)
        self._batch_bytes += len(head) + len(payload)
        if self._batch_bytes >= _LARGE_BATCH_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what this turn has sent so far, if there is anything, and the connection has not ended."""
        if not self._batch or self.lost or self.transport.is_closing():
            return
        frames = b"".join(self._batch)
        self._batch = []
        self._batch_bytes = 0
        self.flushed()
        self.transport.write(_SIZE.pack(len(frames)) + frames)

    def flushed(self) -> None:
        """A batch is written now, with all that was put so far."""

    @property
    def unsent(self) -> bool:
        return not self.lost and bool(self._batch or self.transport.get_write_buffer_size())

    def data_received(self, data: bytes) -> None:
        if self._rest:
            data = self._rest + data
            self._rest = b""
        size, position = len(data), 0
        try:
            while size - position >= _SIZE.size and not self.lost:
                (of_batch,) = _SIZE.unpack_from(data, position)
                start = position + _SIZE.size
                if start + of_batch > size:
                    if of_batch > MAX_BATCH_BYTES:
                        raise MalformedFrameError(f"a batch of {of_batch} bytes is over the limit")  # noqa: TRY301
                    break
                position = start + of_batch
                self._batch_received(data, start, position)
        except MalformedFrameError as error:
            self.refuse(error)
            return
        if position < size and not self.lost:
            self._rest = data[position:]

    def _batch_received(self, data: bytes, position: int, end: int) -> None:
        while position < end and not self.lost:
            start = position + _PREFIX.size
            if start > end:
                raise MalformedFrameError("a batch ends inside a frame")
            prefix, payload_size, number = _PREFIX.unpack_from(data, position)
            middle = start + (prefix >> 8)
            position = middle + payload_size
            if position > end:
                raise MalformedFrameError("a batch ends inside a frame")
            self.frame_received(prefix & 0xFF, number, data[start:middle], data[middle:position])

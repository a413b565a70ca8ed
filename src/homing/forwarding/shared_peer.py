"""The owner's end of the connection that small exchanges share.

A request that came over it is served as any other. Its reply goes back over it if it comes whole and is small; if the app does
anything else, such as to stream, or to wait for its client, the exchange is called to a connection of its own: what the app says
is held until the forwarder has joined it there.

Not here: one request's events (`exchange.py`).
"""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING, Final

from homing.forwarding.frames import (
    CALL,
    DROPPED,
    END,
    GONE,
    LAST_READ,
    MINE,
    MINE_FIRST,
    NOT_MINE,
    RAISED,
    REQUEST,
    SHARED,
    WHOLE,
)
from homing.forwarding.numbered import SMALL_BYTES, NumberedStream
from homing.forwarding.values import MalformedFrameError, encode_value

if TYPE_CHECKING:
    from homing.forwarding.exchange import ReceivedRequest
    from homing.forwarding.receiver import PeerConnection, Receiver

_SMALL: Final = frozenset({WHOLE, NOT_MINE, END, RAISED, MINE})
"""What is said of an exchange over the shared connection."""


class SharedPeer(NumberedStream):
    """One shared connection from another worker. `places`: by number, the exchanges that are not done with."""

    def __init__(self, receiver: Receiver) -> None:
        super().__init__(receiver.loop)
        self.receiver = receiver
        self.places: dict[int, Place] = {}
        self._last_read = 0
        self._closing = False
        """What requests come are not served: the forwarder has been told, or is about to be."""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        super().connection_made(transport)
        self.receiver.shared.add(self)
        self.put(SHARED, 0)

    def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
        if kind == REQUEST:
            if self._closing:
                return
            if number <= self._last_read:
                raise MalformedFrameError("the numbers of requests rise")
            self._last_read = number
            self.places[number] = place = Place(self, number)
            place.request = self.receiver.begin(place, head, payload)
        elif kind == GONE:
            place_left = self.places.pop(number, None)
            if place_left is not None:
                place_left.lose()
        else:
            raise MalformedFrameError(f"a forwarder sent a frame of kind {kind} on a shared connection")

    def say_last_read(self) -> None:
        """Take no more requests, and say so. The forwarder closes the connection once it has heard what is left to be said."""
        self._closing = True
        self.put(LAST_READ, self._last_read)
        self.flush()

    def malformed(self) -> None:
        self.receiver.counters.malformed += 1

    def ended(self) -> None:
        self.receiver.shared_ended(self)
        places = list(self.places.values())
        self.places.clear()
        for place in places:
            place.lose()


class Place:
    """What carries one exchange of a shared connection, until the exchange has joined a connection of its own."""

    __slots__ = ("_held", "_joined", "_peer", "_token", "loop", "number", "receiver", "request")

    def __init__(self, peer: SharedPeer, number: int) -> None:
        self._peer = peer
        self.number = number
        self.loop = peer.loop
        self.receiver = peer.receiver
        self.request: ReceivedRequest | None = None
        """None once the exchange is done with, or was lost."""
        self._held: list[tuple[int, bytes, bytes]] | None = None
        """What is to be said on the connection that it was called to."""
        self._joined: asyncio.Event | None = None
        self._token = 0

    @property
    def write_paused(self) -> bool:
        return self._held is not None or self._peer.write_paused

    async def writable(self) -> None:
        """Wait until more can be said: here, or on the connection that the exchange was called to."""
        if self._held is None:
            await self._peer.writable()
        else:
            self._joined = self._joined or asyncio.Event()
            await self._joined.wait()

    def write(self, kind: int, head: bytes = b"", payload: bytes = b"") -> bool:
        # *Mine* is plain from whatever is said here but *not mine*.
        kind &= ~MINE_FIRST
        if self._held is None:
            # Where this worker stops, nobody can join another connection any more.
            if kind in _SMALL and (len(head) + len(payload) <= SMALL_BYTES or self.receiver.closed):
                self._peer.put(kind, self.number, head, payload)
                return True
            self._held = []
            self._token = token = self.receiver.call(self)
            self._peer.put(CALL, self.number, encode_value(token, "the call"))
        if kind != MINE:
            self._held.append((kind, head, payload))
        return True

    def join(self, connection: PeerConnection) -> ReceivedRequest | None:
        """Go on over `connection`: None if the app has said all that it has to say."""
        for frame in self._held or ():
            connection.write(*frame)
        self._held = None
        self._peer.places.pop(self.number, None)
        request = self.request
        if request is not None:
            request.goes_on_over(connection)
        if self._joined is not None:
            self._joined.set()
        return request

    def exchange_ended(self) -> None:
        """The request is done with."""
        self.request = None
        if self._held is None:
            self._peer.places.pop(self.number, None)

    def lose(self) -> None:
        """The forwarder is gone, or its client is."""
        request, self.request = self.request, None
        if self._held is not None:
            self._held = None
            self.receiver.called.pop(self._token, None)
        if request is not None:
            request.connection_lost()
        if self._joined is not None:
            self._joined.set()

    def abort(self) -> None:
        """This worker stops before the app is done."""
        if self._peer.places.pop(self.number, None) is not None and not self._peer.lost:
            self._peer.put(DROPPED, self.number)
        self.lose()

    def pause_reading(self) -> None:
        """Nothing of the request is read here."""

    def resume_reading(self) -> None:
        """Nothing of the request is read here."""

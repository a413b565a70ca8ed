"""The forwarder's end of the connection that small exchanges share with one owner.

Invariant: a request that the owner may have read is never sent again. What was not written was not read; nor was what came
after the last request that the owner says it has read (`LAST_READ`), before it closes. When the connection breaks, the last
batch was not read in full if its write failed, or if the kernel says that the other end closed with bytes unread (ECONNRESET).
Of the batches before that one nothing is known.

Not here: what an answer means for the client (`forwarder.py`).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Final

from homing.errors import HomingError, OwnerTimeoutError, OwnerUnreachableError
from homing.forwarding.frames import (
    CALL,
    DROPPED,
    END,
    GONE,
    LAST_READ,
    MINE,
    NOT_MINE,
    RAISED,
    REQUEST,
    SHARE,
    SHARED,
    WHOLE,
    frame,
)
from homing.forwarding.numbered import NumberedStream
from homing.forwarding.stream import UndeliveredError
from homing.forwarding.values import MalformedFrameError

if TYPE_CHECKING:
    from homing.forwarding.pool import Frame, OwnerPool

SHARED_FROM: Final = 4
"""So many requests under way at once to one owner, and from then on small ones share a connection."""

LARGEST_HEAD_BYTES: Final = 16 * 1024
"""A request with a larger head gets a connection of its own."""

_MOST_UNDER_WAY: Final = 10_000

_LAST_NUMBER: Final = 2**32 - 1
"""A number has 32 bits: after this one, another connection is made."""

_SILENT_SECONDS: Final = 0.05
"""An owner that was sent something so long ago, and has said nothing since, is sent no more here: if it has died, or stands
still, what goes over a connection of its own can be seen to be unread."""

_ENDS: Final = frozenset({WHOLE, NOT_MINE, END, RAISED, CALL, DROPPED})
"""What ends an exchange here."""


class SmallExchange:
    """A request without a body that was sent over a shared connection.

    Attributes:
        answer: The frame that ended it here (WHOLE, NOT_MINE, END, RAISED, CALL or DROPPED), or an error: UndeliveredError,
            OwnerTimeoutError, OwnerUnreachableError.
        answer_by: When *mine* or *not mine* is due, on the loop's clock; 0 once it was said.
    """

    __slots__ = ("answer", "answer_by", "began", "number")

    def __init__(self, number: int, began: float, answer_by: float, answer: asyncio.Future[Frame]) -> None:
        self.number = number
        self.began = began
        self.answer_by = answer_by
        self.answer = answer

    def __repr__(self) -> str:
        return f"<SmallExchange {self.number}>"


class SharedConnection(NumberedStream):
    """Owns the exchanges that are under way on it.

    Attributes:
        exchanges: Those that await an answer, by number.
        called: The numbers of those that the owner has called to a connection of their own, until they have ended there. The
            owner takes the loss of this connection for their end as long as they have not joined that one.
    """

    def __init__(self, pool: OwnerPool) -> None:
        super().__init__(pool.loop)
        self.pool = pool
        self.exchanges: dict[int, SmallExchange] = {}
        self.called: set[int] = set()
        self.retiring = False
        """It takes no new ones, since few have met here lately."""
        self._ready = False
        """The owner has said that it takes exchanges here."""
        self._last_read: int | None = None
        """The last request that the owner has read, once it has said that it reads no more."""
        self._peak = 0
        """The most exchanges at once since it was last looked at."""
        self._number = 0
        self._written = 0
        self._last_batch = 0
        """The numbers of the last request that was written, and of the first one that may be in the last batch."""
        self._unheard_since = 0.0
        """When something was sent first after the owner's last word; 0: nothing was."""

    def __repr__(self) -> str:
        return f"<SharedConnection to {self.pool.owner}: {len(self.exchanges)} under way>"

    def open(self) -> None:
        """Ask the owner to take exchanges on this connection, which has carried nothing yet."""
        self.transport.write(frame(SHARE))

    def takes(self, now: float) -> bool:
        """Whether a small request is to go here."""
        return (
            self._ready
            and not (self.lost or self.write_paused or self.retiring or self._last_read is not None)
            and now - (self._unheard_since or now) < _SILENT_SECONDS
            and len(self.exchanges) < _MOST_UNDER_WAY
            and self._number < _LAST_NUMBER
        )

    def request(self, head: bytes, now: float, answer_by: float) -> SmallExchange:
        """Send a request. Whoever does not wait for its answer to the end gives it up."""
        exchanges = self.exchanges
        self._number = number = self._number + 1
        exchange = SmallExchange(number, now, answer_by, self.loop.create_future())
        exchanges[number] = exchange
        self._peak = max(self._peak, len(exchanges))
        self.put(REQUEST, number, head)
        return exchange

    def flushed(self) -> None:
        # From now on, not from when it was put: this worker's own delay within a turn is no silence of the owner's.
        if not self._unheard_since and self._number > self._written:
            self._unheard_since = self.loop.time()
        self._last_batch = self._written + 1
        self._written = self._number

    def give_up(self, exchange: SmallExchange) -> None:
        """Nobody waits for the answer any more; the app at the owner sees its client leave."""
        self.exchanges.pop(exchange.number, None)
        self.called.discard(exchange.number)
        if not self.lost:
            self.put(GONE, exchange.number)
        self._let_go()

    def joined(self, exchange: SmallExchange) -> None:
        """The exchange was called, and has ended where it joined."""
        self.called.discard(exchange.number)
        self._let_go()

    def _let_go(self) -> None:
        """Close the connection if the owner reads no more, and has said all that it has to say."""
        if self._last_read is not None and not (self.exchanges or self.called):
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._unheard_since = 0.0
        super().data_received(data)

    def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
        if kind in _ENDS:
            exchange = self.exchanges.pop(number, None)
            if exchange is not None:
                self._heard(exchange)
                if kind == CALL:
                    self.called.add(number)
                if not exchange.answer.done():
                    exchange.answer.set_result((kind, head, payload))
                self._let_go()
        elif kind == MINE:
            exchange = self.exchanges.get(number)
            if exchange is not None:
                self._heard(exchange)
        elif kind == LAST_READ:
            self._last_read = number
            self._fail([each for each in self.exchanges.values() if each.number > number], self._unread)
            self._let_go()
        elif kind == SHARED:
            self._ready = True
        else:
            raise MalformedFrameError(f"an owner sent a frame of kind {kind} on a shared connection")

    def _heard(self, exchange: SmallExchange) -> None:
        if exchange.answer_by:
            exchange.answer_by = 0.0
            self.pool.hops.observe(self.loop.time() - exchange.began)

    def ended(self) -> None:
        self.pool.forget_shared(self)
        self.called.clear()
        self._fail(list(self.exchanges.values()), self._lost)

    def _fail(self, exchanges: list[SmallExchange], failure: Callable[[SmallExchange], HomingError]) -> None:
        for exchange in exchanges:
            del self.exchanges[exchange.number]
            if not exchange.answer.done():
                exchange.answer.set_exception(failure(exchange))

    def _unread(self, exchange: SmallExchange) -> HomingError:
        return UndeliveredError(f"worker {self.pool.owner} closed the connection before it read the request")

    def _lost(self, exchange: SmallExchange) -> HomingError:
        failure: HomingError
        if self._was_read(exchange):
            when = "it said whether the session is its own" if exchange.answer_by else "its reply"
            failure = OwnerUnreachableError(f"worker {self.pool.owner} was lost before {when}")
        else:
            failure = self._unread(exchange)
        failure.__cause__ = self.error
        return failure

    def _was_read(self, exchange: SmallExchange) -> bool:
        """Whether the owner, which is lost, may have read it."""
        number = exchange.number
        if not exchange.answer_by:
            return True
        if number > self._written:
            return False
        in_last_batch = self._last_read is None and number >= self._last_batch
        return not (in_last_batch and isinstance(self.error, BrokenPipeError | ConnectionResetError))

    def expire(self, now: float) -> None:
        """Give up those whose owner has not said *mine* or *not mine* in time."""
        for exchange in [each for each in self.exchanges.values() if 0.0 < each.answer_by <= now]:
            del self.exchanges[exchange.number]
            if not exchange.answer.done():
                exchange.answer.set_exception(
                    OwnerTimeoutError(f"worker {self.pool.owner} did not say in time whether the session is its own")
                )

    def look(self) -> None:
        """Now and then: where few exchanges meet, they are better off on connections of their own."""
        if self._ready and (self._peak < self.pool.shared_from or self._number == _LAST_NUMBER):
            self.retiring = True
        self._peak = len(self.exchanges)
        if self.retiring and not (self.exchanges or self.called or self.unsent):
            self.abort()

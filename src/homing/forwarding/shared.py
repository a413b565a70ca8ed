"""The forwarder's end of the connection that small exchanges share with one owner.

Invariant: a request that the owner may have read is never sent again. What was not written was not read; nor was what came
after the last request that the owner says it has read (`LAST_READ`), before it closes. When the connection breaks, the last
batch was not read in full if its write failed, or if the kernel says that the other end closed with bytes unread (ECONNRESET).
Of the batches before that one nothing is known.

Not here: what an answer means for the client (`forwarder.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import os
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
from homing.forwarding.numbered import MAX_NUMBER, NumberedStream
from homing.forwarding.stream import UndeliveredError
from homing.forwarding.values import MalformedFrameError

if TYPE_CHECKING:
    from homing.forwarding.pool import Frame, OwnerPool

SHARED_FROM: Final = 4
"""Where so many requests are under way to one owner at once, the small ones share a connection."""

LARGEST_REQUEST_BYTES: Final = 16 * 1024
"""A request with a larger head, or a larger body, gets a connection of its own."""

_MOST_UNDER_WAY: Final = 10_000

_SILENT_SECONDS: Final = 0.25
"""An owner that was sent something so long ago, and has said nothing since, is sent no more here: if it has died, or stands
still, what goes over a connection of its own can be seen to be unread."""

_NOT_SHARED_AGAIN_SECONDS: Final = 60.0
"""How long an owner that does not know of shared connections, since it runs another version, is not asked again."""

_CALLED_ONES: Final = 0.1
"""Where of the answers so many are calls to another connection, requests have one of their own from the first on for a while."""

_PAUSE_SECONDS: Final = 10.0
_ANSWERS_WEIGHED: Final = 32

_READ_BYTES: Final = 256 * 1024

_ENDS: Final = frozenset({WHOLE, NOT_MINE, END, RAISED, CALL, DROPPED})
"""What ends an exchange here."""


class SmallExchange:
    """A small request that was sent over a shared connection.

    Attributes:
        answer: The frame that ended it here (WHOLE, NOT_MINE, END, RAISED, CALL or DROPPED), or an error: UndeliveredError,
            OwnerTimeoutError, OwnerUnreachableError.
        answer_by: When *mine* or *not mine* is due, on the loop's clock; 0 once it was said.
        on_mine: Called if the owner says *mine* before its answer.
    """

    __slots__ = ("answer", "answer_by", "began", "number", "on_mine")

    def __init__(
        self,
        number: int,
        began: float,
        answer_by: float,
        answer: asyncio.Future[Frame],
        on_mine: Callable[[], object],
    ) -> None:
        self.number = number
        self.began = began
        self.answer_by = answer_by
        self.answer = answer
        self.on_mine = on_mine

    def __repr__(self) -> str:
        return f"<SmallExchange {self.number}>"


class SharedConnection(NumberedStream):
    """Owns the exchanges that are under way on it.

    Attributes:
        exchanges: Those that await an answer, by number.
        called: Those that the owner has called to a connection of their own, until they have ended there. As long as they have
            not joined that one, the owner takes the loss of this one for their end.
        used_at: When a request was sent last, on the loop's clock.
    """

    def __init__(self, pool: OwnerPool) -> None:
        super().__init__(pool.loop)
        self.pool = pool
        self.exchanges: dict[int, SmallExchange] = {}
        self.called: set[SmallExchange] = set()
        self.used_at = pool.loop.time()
        self._called_ones = 0.0
        """How many of the last answers were calls, from 0 to 1; the later ones weigh more."""
        self._paused_until = 0.0
        self._unanswered = 0
        """Of the exchanges, those whose owner has said nothing."""
        self._ready = False
        """The owner has said that it takes exchanges here."""
        self._last_read: int | None = None
        """The last request that the owner has read, once it has said that it reads no more."""
        self._number = 0
        self._written = 0
        self._last_batch = 0
        """The numbers of the last request that was written, and of the first one that may be in the last batch."""
        self._unheard_since = 0.0
        """When a request was written first after the owner's last word; 0: none was."""

    def __repr__(self) -> str:
        return f"<SharedConnection to {self.pool.owner}: {len(self.exchanges)} under way>"

    def open(self) -> None:
        """Ask the owner to take exchanges on this connection, which has carried nothing yet."""
        self.transport.write(frame(SHARE))

    def takes(self, now: float) -> bool:
        """Whether a small request is to go here."""
        silent = self._unanswered and self._unheard_since and now - self._unheard_since >= _SILENT_SECONDS
        return (
            self._ready
            and not (self.lost or self.write_paused or silent or self._last_read is not None)
            and now >= self._paused_until
            and self._number < MAX_NUMBER
            and len(self.exchanges) < _MOST_UNDER_WAY
        )

    def request(
        self, head: bytes, payload: bytes, now: float, answer_by: float, on_mine: Callable[[], object]
    ) -> SmallExchange:
        """Send a request. Whoever does not wait for its answer to the end gives it up."""
        self._number = number = self._number + 1
        exchange = SmallExchange(number, now, answer_by, self.loop.create_future(), on_mine)
        self.exchanges[number] = exchange
        self._unanswered += 1
        self.used_at = now
        self.put(REQUEST, number, head, payload)
        return exchange

    def flushed(self) -> None:
        # From now on, not from when it was put: this worker's own delay within a turn is no silence of the owner's.
        if not self._unheard_since and self._number > self._written:
            self._unheard_since = self.loop.time()
        self._last_batch = self._written + 1
        self._written = self._number

    def give_up(self, exchange: SmallExchange) -> None:
        """Nobody waits for the answer any more; the app at the owner sees its client leave."""
        self.called.discard(exchange)
        if self.exchanges.pop(exchange.number, None) is not None and exchange.answer_by:
            self._unanswered -= 1
        if not self.lost:
            self.put(GONE, exchange.number)
        self._let_go()

    def joined(self, exchange: SmallExchange) -> None:
        """The exchange was called, and has ended where it joined."""
        self.called.discard(exchange)
        self._let_go()

    def _let_go(self) -> None:
        """Close the connection if the owner reads no more, and has said all that it has to say."""
        if self._last_read is not None and self.idle:
            self.abort()

    def data_received(self, data: bytes) -> None:
        self._unheard_since = 0.0
        super().data_received(data)

    def frame_received(self, kind: int, number: int, head: bytes, payload: bytes) -> None:
        if kind in _ENDS:
            exchange = self.exchanges.pop(number, None)
            if exchange is not None:
                self._heard(exchange)
                self._called_ones += ((kind == CALL) - self._called_ones) / _ANSWERS_WEIGHED
                if kind == CALL:
                    self.called.add(exchange)
                    if self._called_ones > _CALLED_ONES:
                        self._called_ones = 0.0
                        self._paused_until = self.loop.time() + _PAUSE_SECONDS
                if not exchange.answer.done():
                    exchange.answer.set_result((kind, head, payload))
                self._let_go()
        elif kind == MINE:
            exchange = self.exchanges.get(number)
            if exchange is not None:
                self._heard(exchange)
                exchange.on_mine()
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
            self._unanswered -= 1
            self.pool.hops.observe(self.loop.time() - exchange.began)

    def connection_lost(self, exc: Exception | None) -> None:
        if exc is not None and not self.lost:
            # A write has failed, and what the owner has said before it closed may not have been read. The loop reads no more.
            with contextlib.suppress(OSError):
                descriptor = self.transport.get_extra_info("socket").fileno()
                while not self.lost and (data := os.read(descriptor, _READ_BYTES)):
                    self.data_received(data)
        super().connection_lost(exc)

    def ended(self) -> None:
        if not self._ready:
            self.pool.shares_again_at = self.loop.time() + _NOT_SHARED_AGAIN_SECONDS
        self.pool.forget_shared(self)
        self.called.clear()
        self._fail(list(self.exchanges.values()), self._lost)

    def _fail(self, exchanges: list[SmallExchange], failure: Callable[[SmallExchange], HomingError]) -> None:
        for exchange in exchanges:
            del self.exchanges[exchange.number]
            if exchange.answer_by:
                self._unanswered -= 1
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
            if not exchange.answer.done():
                exchange.answer.set_exception(
                    OwnerTimeoutError(f"worker {self.pool.owner} did not say in time whether the session is its own")
                )

    @property
    def idle(self) -> bool:
        return not (self.exchanges or self.called)

"""One request that this worker serves, from before its handler to after: what it uses, makes known, and leaves behind.

The invariant: whatever the handler does, what was entered is left once, and a session's ID reaches the client only
after the session's owner is on record.

Not here: whether the request is served at all (`middleware.py`).
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Collection
from contextlib import AbstractContextManager, nullcontext
from typing import Final

from homing.directory.ownership import Entry
from homing.errors import HomingError, SessionNotRecordedError
from homing.identity import Named
from homing.lifetime import BEGAN_SCOPE_KEY, ENDED_SCOPE_KEY, succeeded
from homing.routing.worker import Worker
from homing.types import Scope, SessionId, session_tag

logger = logging.getLogger(__name__)

REQUEST_SCOPE_KEY: Final = "homing.request"
SESSION_ID_SCOPE_KEY: Final = "homing.session_id"
SESSION_ACQUIRE_SCOPE_KEY: Final = "homing.acquire_session"


class RoutedRequest:
    """A request being served here. In the scope as `homing.request`, for the handler's side of the bargain.

    Args:
        entry: What entering the session gave, if that was done already; it is left with the request.

    Attributes:
        session_id: The session it names, or the one minted for it; None if it has none.
        used: The handler read or wrote the session; where nobody can see that, set from the reply.
        status: Of the reply, once it has begun; 101 for an accepted WebSocket.
        unrecorded: Set when an ID could not be recorded: from then on nothing the app sends may leave.
    """

    __slots__ = (
        "_began",
        "_ended",
        "_entry",
        "_learned",
        "_left",
        "_unnamed",
        "_worker",
        "named",
        "session_id",
        "status",
        "unrecorded",
        "used",
    )

    def __init__(
        self, worker: Worker | None, named: Named, session_id: SessionId | None, entry: Entry | None = None
    ) -> None:
        self._worker = worker
        self._began = 0 if worker is None else worker.lifetimes.ends
        self._entry = entry  # of the session, once it is entered
        self._learned: list[Entry] | None = None  # of those that the app made beside it
        self._ended = False
        self._left = False
        self._unnamed: Callable[[Scope, int], object] | None = None
        self.named = named
        self.session_id = session_id
        self.used = False
        self.status: int | None = None
        self.unrecorded: SessionNotRecordedError | None = None

    def __repr__(self) -> str:
        tag = session_tag(self.session_id) if self.session_id is not None else None
        return f"<RoutedRequest session={tag} status={self.status} used={self.used}>"

    def enter(self) -> None:
        """Look at the record, and count this request as served, in one block.

        Raises:
            NotHereError: the session is another worker's.
            SessionMovingError: the session is fenced, or not (or no longer) open here.
        """
        if self._worker is not None and self.session_id is not None:
            self._entry = self._worker.owners.enter(self.session_id)

    def take_place(self, unnamed: Callable[[Scope, int], object]) -> None:
        """Count as a session towards the limit, until the app has named the session, or the request leaves.

        Args:
            unnamed: Told the scope and status of a success that left without a name for the session it started.
        """
        if self._worker is not None:
            self._unnamed = unnamed
            self._worker.starting += 1
            self._worker.count_sessions()

    def _give_place(self) -> None:
        if self._unnamed is not None and self._worker is not None:
            self._unnamed = None
            self._worker.starting -= 1
            self._worker.count_sessions()

    def acquire(self) -> None:
        """Record this worker as the owner of the session minted for this request, before its ID leaves: a use of it.

        Raises:
            SessionNotRecordedError: it could not be recorded; the reply becomes a 500 without cookie.
        """
        self.used = True
        if self._entry is not None or self._worker is None or self.session_id is None:
            return
        worker, session_id = self._worker, self.session_id
        self._entry = worker.in_loop(lambda: self._record(worker, session_id))

    def learn(self, session_ids: Collection[SessionId]) -> None:
        """Record this worker as the owner of sessions that the app has made, before the bytes that name them leave.

        Raises:
            SessionNotRecordedError: as for `acquire`. Then none of them is kept, since none of their IDs leaves.
        """
        worker = self._worker
        if worker is None:
            return
        made = [session_id for session_id in session_ids if session_id != self.session_id]
        if not made:
            return
        if self._learned is None:
            self._learned = []
        for session_id in made:
            self._learned.append(self._record(worker, session_id))
        for session_id in made:
            worker.lifetimes.opened(session_id)
        self._give_place()

    def _record(self, worker: Worker, session_id: SessionId) -> Entry:
        try:
            owner = worker.owners.acquire(session_id)
            if owner != worker.id:
                # Nobody else could know the ID, so the app gave the same one twice, at two workers.
                raise SessionNotRecordedError(f"session {session_tag(session_id)} is owned by worker {owner} already")
            # Counted from now on: a request that names it may come and go before this one has left.
            return worker.owners.enter(session_id)
        except HomingError as error:
            if isinstance(error, SessionNotRecordedError):
                self.unrecorded = error
            else:
                self.unrecorded = SessionNotRecordedError(f"session {session_tag(session_id)}: {error}")
            logger.warning("session not recorded: %s", self.unrecorded)
            raise self.unrecorded from error

    def makes_known(self, scope: Scope, status: int) -> bool:
        """Whether a reply with this status may carry the session's ID: the session was used, or is started by it."""
        return self.used or (self.named.start and succeeded(scope, status))

    def end(self) -> None:
        """This request's session has ended; its owner is kept for the close retry window. On any thread, and at any time.

        A request that named none may have begun some, which its reply has made known: those have ended.
        """
        self._ended = True
        worker = self._worker
        # `leave`, on the event loop, sets the one and then looks at the other: whatever comes between, one of the two sees it.
        if self._left and worker is not None and not worker.drained:
            worker.in_loop(lambda: self._end_now(worker))

    def _end_now(self, worker: Worker) -> None:
        entries = (self._learned or ()) if self.session_id is None else (self._entry,)
        here = [SessionId(entry.key) for entry in entries if entry is not None and entry.owned]
        for session_id in here:
            worker.lifetimes.ended(session_id)
            worker.path_keys.unbind(session_id)
        if here:
            worker.count_sessions()
        else:
            tag = None if self.session_id is None else session_tag(self.session_id)
            logger.warning("an end that came after its request has ended nothing: not here session=%s", tag)

    def serving(self, session_id: str) -> AbstractContextManager[None]:
        """Count this request as served for another session too; raises `NotHereError` where that is not here."""
        if self._worker is None or session_id == self.session_id:
            return nullcontext()
        return _Touch(self._worker, session_id)

    def leave(self, arrived: Scope, *, failed: bool) -> None:
        """The handler is done: record what became of the session, and stop counting the request.

        Args:
            arrived: The request's scope; a copy from before the handler wherever a route may start or end a session.
            failed: The handler raised, or left its reply incomplete; the session is recorded with status None.
        """
        worker, session_id = self._worker, self.session_id
        if worker is None:
            return
        status = None if failed else self.status
        self._left = True
        entry = self._entry
        try:
            # Not owned: taken meanwhile from a worker that was thought dead, and its lifetime is not kept here.
            if session_id is not None and entry is not None and entry.owned:
                self._leave_session(worker, session_id, arrived, status)
            elif self._ended and session_id is None and self._learned and self.unrecorded is None:
                self._end_now(worker)
        finally:
            if entry is not None:
                worker.owners.leave(entry)
            for made in self._learned or ():
                worker.owners.leave(made)
            if self._unnamed is not None:
                if status is not None and succeeded(arrived, status):
                    self._unnamed(arrived, status)
                self._give_place()
        if session_id is not None and not (worker.owners.mine(session_id) if entry is None else entry.owned):
            worker.path_keys.unbind(session_id)

    def _leave_session(self, worker: Worker, session_id: SessionId, arrived: Scope, status: int | None) -> None:
        named, lifetimes = self.named, worker.lifetimes
        turned = (named.start or named.end) and succeeded(arrived, status)
        # A record acquired for this very request goes at once if the request left nothing behind.
        ended = self._ended or (turned and named.end)
        if ended:
            arrived[ENDED_SCOPE_KEY] = True
        if lifetimes.ends != self._began:
            arrived[BEGAN_SCOPE_KEY] = self._began
        if self.used or turned or ended or lifetimes.holds(session_id):
            lifetimes.served(session_id, arrived, status)
        if self.used and not lifetimes.holds(session_id):
            # It used the session and then failed: what it left is there, so its owner is kept.
            lifetimes.opened(session_id)
        if turned or ended:
            worker.count_sessions()
        if ended:
            worker.path_keys.unbind(session_id)
        elif named.start_path_key is not None:
            refused = status is not None and not turned
            worker.path_keys.seeded(session_id, refused=refused, others=worker.owners.served_now(session_id) - 1)


# A touch is a request on no route: it neither starts nor ends the session, whatever route the handler is on.
_TOUCH_SCOPE: Final[Scope] = {"type": "http", "method": "", "path": "", "headers": []}


class _Touch:
    """Another session that a handler touches: counted while it does, and its lifetime goes on from there."""

    __slots__ = ("_serving", "_session_id", "_worker")

    def __init__(self, worker: Worker, session_id: str) -> None:
        self._worker = worker
        self._session_id = session_id
        self._serving = worker.owners.serving(session_id)

    def __enter__(self) -> None:
        self._worker.in_loop(self._serving.__enter__)

    def __exit__(self, *details: object) -> None:
        self._worker.in_loop(self._leave)

    def _leave(self) -> None:
        if self._worker.lifetimes.holds(self._session_id):
            # With no status, as a request that only counts: the client did not ask for this session, so one that has
            # ended stays ended.
            self._worker.lifetimes.served(self._session_id, _TOUCH_SCOPE, None)
        self._serving.__exit__(None, None, None)


def new_session_id() -> SessionId:
    """An ID for a session that begins here: 122 random bits, so nobody else can know it."""
    return SessionId(uuid.uuid4().hex)

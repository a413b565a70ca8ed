"""Where one request is to be served: the look-ups, and what is done about them, until that is settled.

The invariant: between the last look at a session's record and the handler there is no `await`. A request that came from a
peer is never passed on (the test mode's scattered one excepted), and one that may have been delivered is never sent again.

Not here: what the decision is (`decision.py`, a plain function), and running the handler (`middleware.py`).
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from typing import Final, assert_never

from homing.directory import SessionOwners
from homing.errors import (
    HomingError,
    NotHereError,
    OwnerGoneError,
    OwnerRefusedError,
    SessionGoneError,
    SessionLimitError,
    SessionMovingError,
    WorkerFullError,
)
from homing.forwarding.base import Hop
from homing.forwarding.replay import Replayable
from homing.identity import Named
from homing.routing.decision import Acquire, Forward, Gone, Moving, NotMine, Serve, ServeUnowned, Unowned, decide
from homing.routing.notes import note_of, note_of_a_later_one, says_others_wait
from homing.routing.policy import Policy, nothing
from homing.routing.request import RoutedRequest, new_session_id
from homing.routing.starts import StartOnItsWay
from homing.routing.worker import Worker
from homing.types import Reason, Receive, Scope, Send, SessionId, WorkerId, session_tag

LOOKS: Final = 3
"""How often a request's owner is looked up: once, and at most twice more after *not mine* or *refused*."""


def enter_here(worker: Worker, named: Named) -> RoutedRequest | None:
    """The way of most requests: one that names a session of this worker, entered with one look at the session's record.

    None: it takes more than that (`Routing`).

    Raises:
        SessionMovingError: the session is fenced.
    """
    session_id = named.session_id
    # A start may have to wait where there is a limit; one of a session that has ended counts as a new one.
    if session_id is None or named.start_path_key is not None or (named.start and worker.looks_at_starts):
        return None
    entry = worker.owners.try_enter(session_id)
    return None if entry is None else RoutedRequest(worker, named, session_id, entry)


def owned_elsewhere(worker: Worker, named: Named) -> WorkerId | None:
    """The other worker that owns the session, at a first look; None: it takes more than that (`Routing`).

    Raises:
        DirectoryError: the record cannot be read, or names no worker of this boot.
    """
    session_id, owners = named.session_id, worker.owners
    if session_id is None or owners.mine(session_id) or (named.start and worker.placement is not None):
        return None
    owner = owners.owner(session_id)
    return None if owner == worker.id else owner


async def forward_at_once(
    worker: Worker, owner: WorkerId, named: Named, scope: Scope, receive: Replayable, send: Send
) -> bool:
    """The way of most requests that belong elsewhere: what `Routing` does too, in fewer steps. Of a client's own request.

    Returns:
        True: handled there. False: not delivered, and the record has to be looked at again; `receive` gives what it gave.

    Raises:
        ReplyError, ReplyCutError, RemoteAppError: as `Routing.route`.
    """
    try:
        return await worker.forwarder.forward(owner, Reason.OWNED, note_of(named), scope, receive, send)
    except OwnerRefusedError as error:
        session_id = named.session_id
        assert session_id is not None
        _check_not_gone(worker.owners, session_id, owner, error)
        return False


def _check_not_gone(records: SessionOwners, key: str, owner: WorkerId, error: OwnerRefusedError) -> None:
    # It may have given or released the session before it exited: gone only if the record still names it.
    if records.owner(key) == owner:
        raise OwnerGoneError(key, owner) from error


class Routing:
    """One request's look-ups. `receive` is what the handler must read from afterwards; `forwarded_to` is the session's owner,
    once that has handled the request.

    Borrows `worker`, `hop`, `receive` and `send`; keeps what it took from `receive` until an owner has said *mine*.

    Args:
        client_left: As for `StartOnItsWay`.
    """

    __slots__ = (
        "_client_left",
        "_hop",
        "_named",
        "_others_wait",
        "_policy",
        "_reason",
        "_scope",
        "_send",
        "_start",
        "_worker",
        "forwarded_to",
        "receive",
    )

    def __init__(
        self,
        worker: Worker,
        policy: Policy,
        named: Named,
        hop: Hop | None,
        scope: Scope,
        receive: Receive,
        send: Send,
        client_left: Callable[[], Awaitable[None]] | None = None,
    ) -> None:
        self._worker = worker
        self._policy = policy
        self._named = named
        self._hop = hop
        self._reason = None if hop is None else hop.reason
        self._others_wait = hop is not None and says_others_wait(hop.note)
        self._scope = scope
        self._send = send
        self._client_left = client_left
        self.receive = receive
        self._start: StartOnItsWay | None = None
        self.forwarded_to: WorkerId | None = None

    async def route(self, looks: int = LOOKS) -> RoutedRequest | None:
        """The request, entered, if it is to be served here; None if it was handled elsewhere or answered *not mine*.

        Args:
            looks: How often its owner may be looked up.

        Raises:
            ReplyError: what to answer instead.
            ReplyCutError: the owner was lost inside its reply.
            RemoteAppError: the app raised at the owner.
        """
        request = await self._routed(looks)
        if request is not None and isinstance(self.receive, Replayable):
            self.receive.release()  # it stays here, so nothing needs to be given again
        return request

    async def _routed(self, looks: int) -> RoutedRequest | None:
        named = self._named
        if self._policy.scatter and self._reason is None and await self._scattered():
            return None
        placement = self._worker.placement
        if placement is None or not named.start:
            return await self._settled(looks)
        if self._reason is None or self._reason is Reason.SCATTERED:
            self._start = start = StartOnItsWay(
                self._worker,
                placement,
                named,
                note_of(named),
                self._scope,
                self._kept(),
                self._send,
                client_left=self._client_left,
            )
            return await start.in_turn(lambda: self._settled(looks))
        try:
            return await self._settled(looks)
        except WorkerFullError:
            raise
        except SessionLimitError:
            # Its sender knows of other workers, or has it wait, or refuses it.
            self._not_mine()
            return None

    async def _settled(self, looks: int) -> RoutedRequest | None:
        named = self._named
        if named.session_id is not None:
            return await self._route_session(named.session_id, looks)
        if named.path_key is not None:
            return await self._route_path_key(named.path_key)
        if named.worker is not None and named.worker != self._worker.id and self._reason is None:
            await self._send_to_named(named.worker)
            return None
        if named.worker is None and await self._begun_elsewhere():
            return None
        if self._start is not None and named.worker is None and await self._start.placed():
            return None
        return self._serve_nameless()

    # --- a session, named by the client ---

    async def _route_session(self, session_id: SessionId, looks: int) -> RoutedRequest | None:
        worker, owners = self._worker, self._worker.owners
        unowned = Unowned.ACQUIRE if self._policy.adopts or self._named.start else Unowned.REFUSE
        for _ in range(looks):
            if owners.mine(session_id):
                begins_anew = self._begins_anew(session_id)
                try:
                    self._bind_path_key(session_id)
                    request = RoutedRequest(worker, self._named, session_id)
                    request.enter()
                except NotHereError:
                    pass
                else:
                    if begins_anew:
                        # It has ended until its reply says otherwise, and takes a place all the while.
                        request.take_place(nothing)
                    return request
            decision = decide(
                owner=owners.owner(session_id),
                here=worker.id,
                mine=owners.mine(session_id),
                reason=self._reason,
                unowned=unowned,
            )
            match decision:
                case Serve():
                    continue
                case Acquire():
                    if await self._begun_elsewhere():
                        return None
                    if self._start is not None and await self._start.placed():
                        return None
                    request = RoutedRequest(worker, self._named, session_id)
                    placed_at = self._acquire(request, session_id)
                    if placed_at == worker.id:
                        return request
                    if placed_at is not None and await self._place(placed_at):
                        return None
                case Forward(owner):
                    if await self._forward(owner, Reason.OWNED, owners, session_id):
                        return None
                case NotMine():
                    self._not_mine()
                    return None
                case Gone():
                    raise SessionGoneError(f"nobody owns session {session_tag(session_id)}")
                case Moving():
                    raise SessionMovingError(f"session {session_tag(session_id)} is not open here (yet)")
                case ServeUnowned():
                    raise AssertionError("a session is acquired or refused")
                case _:
                    assert_never(decision)
        raise SessionMovingError(f"session {session_tag(session_id)} was nowhere that it was looked for")

    def _begins_anew(self, session_id: SessionId) -> bool:
        """Whether a start finds its session ended, in its close retry window: then it is a new one, for the limit."""
        worker = self._worker
        if not (self._named.start and worker.looks_at_starts and worker.has_ended(session_id)):
            return False
        self._check_limit(anew=True)
        return True

    def _acquire(self, request: RoutedRequest, session_id: SessionId) -> WorkerId | None:
        """Acquire the session, and its path key, and enter it: one block without an await.

        Returns this worker if that is done; another worker if it holds the path key, so the start belongs there; None if
        another worker was quicker and the record has to be looked at again.
        """
        try:
            self._check_limit()
        except SessionLimitError:
            if (holder := self._holder_elsewhere()) is None:
                raise
            return holder
        try:
            return self._acquire_here(request, session_id)
        finally:
            # The room that was taken for it and is not needed is given back.
            self._worker.count_sessions()

    def _acquire_here(self, request: RoutedRequest, session_id: SessionId) -> WorkerId | None:
        worker, owners = self._worker, self._worker.owners
        if owners.acquire(session_id) != worker.id:
            return None
        # What an earlier session of this ID was bound to, whose agent has released it since: no key of this one.
        worker.path_keys.unbind(session_id)
        try:
            holder = self._bind_path_key(session_id)
            if holder == worker.id:
                request.enter()
                return holder
        except HomingError:
            worker.path_keys.unbind(session_id)
            owners.release(session_id, why=None)
            raise
        owners.release(session_id, why=None)
        return holder

    def _holder_elsewhere(self) -> WorkerId | None:
        """The other worker that holds the start's path key, where it is to run, whatever room there is here."""
        key, worker = self._named.start_path_key, self._worker
        holder = None if key is None else worker.path_keys.owners.owner(key)
        return None if holder is None or holder == worker.id or worker.run_directory.is_dead(holder) else holder

    def _bind_path_key(self, session_id: SessionId) -> WorkerId:
        key = self._named.start_path_key
        return self._worker.id if key is None else self._worker.path_keys.bind(session_id, key)

    async def _place(self, holder: WorkerId) -> bool:
        """Send a start to the worker that holds its path key."""
        if self._reason is not None and self._reason is not Reason.SCATTERED:
            self._not_mine()
            return True
        key = self._named.start_path_key
        assert key is not None
        return await self._forward(holder, Reason.PLACED, self._worker.path_keys.owners, key)

    # --- no session: a path key, a named worker, or nothing ---

    async def _route_path_key(self, key: str) -> RoutedRequest | None:
        """A path key is looked up and never acquired: with no owner, the request is handled where it lands."""
        worker, owners = self._worker, self._worker.path_keys.owners
        for _ in range(LOOKS):
            decision = decide(
                owner=owners.owner(key),
                here=worker.id,
                mine=owners.mine(key),
                reason=self._reason,
                unowned=Unowned.SERVE,
            )
            match decision:
                case Serve() | ServeUnowned():
                    return self._serve_nameless()
                case Forward(owner):
                    if await self._forward(owner, Reason.OWNED, owners, key):
                        return None
                case NotMine():
                    self._not_mine()
                    return None
                case Moving():
                    raise SessionMovingError
                case Acquire() | Gone():
                    raise AssertionError("a path key is neither acquired nor refused")
                case _:
                    assert_never(decision)
        raise SessionMovingError

    async def _send_to_named(self, named: WorkerId) -> None:
        try:
            handled = await self._worker.forwarder.forward(
                named, Reason.NAMED, self._note(), self._scope, self._kept(), self._send
            )
        except OwnerRefusedError as error:
            raise SessionGoneError(f"worker {named}, which the request names, has exited") from error
        if not handled:
            self._check_room_at(named)
            raise SessionMovingError(f"worker {named}, which the request names, did not take it")

    def _serve_nameless(self) -> RoutedRequest:
        """A request that names no session here: it may begin one, under an ID minted for it or made by the app."""
        named, worker = self._named, self._worker
        if not named.mints:
            self._check_limit()
            request = RoutedRequest(worker, named, None)
            if named.start:
                request.take_place(self._policy.unnamed_start)
            else:
                self._policy.unnamed_request(self._scope, worker)
            return request
        session_id = new_session_id()
        request = RoutedRequest(worker, named, session_id)
        # A start acquires before the handler: the reply's cookie will name the session, whatever the handler does.
        if named.start and self._acquire(request, session_id) != worker.id:
            raise SessionMovingError
        return request

    # --- what all of them do ---

    async def _forward(self, owner: WorkerId, reason: Reason, records: SessionOwners, key: str) -> bool:
        """True: handled there. False: not delivered, and the record has to be looked at again."""
        try:
            handled = await self._worker.forwarder.forward(
                owner, reason, self._note(), self._scope, self._kept(), self._send
            )
        except OwnerRefusedError as error:
            _check_not_gone(records, key, owner, error)
            return False
        if not handled:
            if records.owner(key) == owner:
                self._check_room_at(owner)
        elif reason is Reason.OWNED:
            self.forwarded_to = owner
        return handled

    def _note(self) -> tuple[object, ...]:
        """What the other worker is told; of a start before which others wait, that too."""
        waits = self._start is not None and not self._start.allowed
        return note_of_a_later_one(self._named) if waits else note_of(self._named)

    def _check_room_at(self, other: WorkerId) -> None:
        """A start has to run there, and that worker did not take it: had it no room, the start waits, or is refused."""
        placement = self._worker.placement
        if self._start is None or placement is None or (placement.permits is None and self._start.allowed):
            return
        if other not in self._worker.run_directory.marks("drained"):
            raise SessionLimitError(f"worker {other}, where it would have to begin, has no room for another session")

    async def _begun_elsewhere(self) -> bool:
        """This worker is to leave, so what may begin a session here is sent to another. False: it begins here after all."""
        if not self._worker.draining or self._start is not None:
            return False  # a declared start is placed (`starts.py`)
        if self._reason is not None:
            return False  # what a peer sends is never passed on
        others = self._worker.others_to_start_at()
        if not others:
            return False
        try:
            return await self._worker.forwarder.forward(
                random.choice(others),  # noqa: S311 - a place needs no secrecy
                Reason.PLACED,
                note_of(self._named),
                self._scope,
                self._kept(),
                self._send,
            )
        except OwnerRefusedError:
            return False

    async def _scattered(self) -> bool:
        """Test mode: a request that arrived at the right worker makes a detour through a wrong one."""
        worker, named = self._worker, self._named
        if named.session_id is not None and worker.owners.owner(named.session_id) not in (None, worker.id):
            return False
        detour = worker.another()
        if detour is None:
            return False
        try:
            return await worker.forwarder.forward(
                detour, Reason.SCATTERED, note_of(self._named), self._scope, self._kept(), self._send
            )
        except OwnerRefusedError:
            return False

    def _check_limit(self, *, anew: bool = False) -> None:
        """See that a start may begin its session here; `anew`: it finds an ended one here."""
        limit, worker = self._policy.max_sessions, self._worker
        if not self._named.start:
            return
        if limit is not None and worker.count_live() >= limit:
            kind = WorkerFullError if anew or self._belongs_here() else SessionLimitError
            raise kind(f"this worker has {limit} sessions, the most it may have")
        if worker.placement is None:
            return
        if self._others_wait or (self._start is not None and not self._start.allowed):
            raise SessionLimitError("others wait to begin a session, who came before")
        if not worker.placement.take():
            raise SessionLimitError("the server has as many sessions as it may have")

    def _belongs_here(self) -> bool:
        """Whether the start can run at no other worker: it names this one, or its path key is here."""
        key = self._named.start_path_key
        if self._reason is Reason.NAMED or self._named.worker is not None:
            return True
        return key is not None and self._worker.path_keys.owners.mine(key)

    def _not_mine(self) -> None:
        assert self._hop is not None
        self._hop.not_mine()

    def _kept(self) -> Replayable:
        """What the handler will read from, if the request stays here after all: nothing taken meanwhile is lost."""
        receive = self.receive
        if isinstance(receive, Replayable):
            return receive
        self.receive = kept = Replayable(receive)
        return kept

"""Path keys: names other than session IDs that lead to a session's worker, such as `/rollouts/<id>`.

A path key is acquired with the session whose start names it, and held until the last such session has ended here. The
invariant: while a session bound to a key runs at this worker, the key's record names this worker, so a request that
knows only the key cannot miss it.

Not here: which requests name a path key (`homing.identity`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from homing.directory import SessionOwners
from homing.directory.base import OwnerAliveError
from homing.rundir import RunDirectory
from homing.types import PATH, SessionId, WorkerId


@dataclass(slots=True)
class _Binding:
    """A session's path key. Not `started`: so far only starts under way hold it, and goes with the last if all fail."""

    key: str
    started: bool = False


class PathKeys:
    """The path keys that this worker holds, each for as long as a session bound to it runs here."""

    def __init__(self, run_directory: RunDirectory, worker_id: WorkerId, *, kind: str = PATH) -> None:
        self._bindings: dict[SessionId, _Binding] = {}
        self._bound: Counter[str] = Counter()
        self._here = worker_id
        self._run_directory = run_directory
        self.owners = SessionOwners(run_directory.path, worker_id, self._holds, kind=kind, run_directory=run_directory)

    def __repr__(self) -> str:
        return f"<PathKeys {self._here[:6]}: {len(self._bound)} keys of {len(self._bindings)} sessions>"

    def _holds(self, key: str) -> bool:
        return key in self._bound

    def bind(self, session_id: SessionId, key: str) -> WorkerId:
        """Hold key for the session unless another worker holds it; return the key's owner. One block, no await.

        A session has one key: while it has one, another is not looked at. What a dead worker held runs nowhere, so this
        worker takes its key: another attempt at a rollout is not lost with the worker of the first.

        Raises:
            DirectoryBusyError: a dead worker's key cannot be taken at the moment.
            DirectoryError, ForeignRecordError: as `SessionOwners.acquire`.
        """
        if session_id in self._bindings:
            return self._here
        owner = self.owners.acquire(key)
        if owner != self._here and self._run_directory.is_dead(owner):
            owner = self._take(key)
        if owner == self._here:
            self._bindings[session_id] = _Binding(key)
            self._bound[key] += 1
        return owner

    def _take(self, key: str) -> WorkerId:
        try:
            self.owners.rewrite(key)
        except OwnerAliveError as error:
            return error.owner  # another worker was quicker
        return self._here

    def seeded(self, session_id: SessionId, *, refused: bool, others: int) -> None:
        """A start of the session is leaving. If it was refused, as a late one after a close is, it holds no key.

        Args:
            others: How many other requests of the session are being served here; one of them may be a start.
        """
        binding = self._bindings.get(session_id)
        if binding is None:
            return
        if not refused:
            binding.started = True
        elif not binding.started and not others:
            self.unbind(session_id)

    def unbind(self, session_id: SessionId) -> None:
        """The session has ended here: its key goes with the last session bound to it. Safe to call twice."""
        binding = self._bindings.pop(session_id, None)
        if binding is None:
            return
        self._bound[binding.key] -= 1
        if not self._bound[binding.key]:
            del self._bound[binding.key]
            self.owners.release(binding.key)

    def settle(self, mine: Callable[[str], bool]) -> None:
        """Unbind the sessions that this worker no longer owns, whoever released them."""
        for session_id in [each for each in self._bindings if not mine(each)]:
            self.unbind(session_id)

"""Path keys: names other than session IDs that lead to a session's worker, such as `/rollouts/<id>`.

A path key is acquired with the session whose start names it, and held until the last such session has ended here. The
invariant: while a session bound to a key runs at this worker, the key's record names this worker, so a request that
knows only the key cannot miss it.

Not here: which requests name a path key (`homing.identity`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from homing.directory import SessionOwners
from homing.rundir import RunDirectory
from homing.types import PATH, SessionId, WorkerId


class PathKeys:
    """The path keys that this worker holds, each for as long as a session bound to it runs here."""

    def __init__(self, run_directory: RunDirectory, worker_id: WorkerId) -> None:
        self._key_of: dict[SessionId, str] = {}
        self._bound: Counter[str] = Counter()
        self._here = worker_id
        self.owners = SessionOwners(run_directory.path, worker_id, self._holds, kind=PATH, run_directory=run_directory)

    def __repr__(self) -> str:
        return f"<PathKeys {self._here[:6]}: {len(self._bound)} keys of {len(self._key_of)} sessions>"

    def _holds(self, key: str) -> bool:
        return key in self._bound

    def bind(self, session_id: SessionId, key: str) -> WorkerId:
        """Hold key for the session unless another worker holds it; return the key's owner. One block, no await."""
        if session_id in self._key_of:
            return self._here
        owner = self.owners.acquire(key)
        if owner == self._here:
            self._key_of[session_id] = key
            self._bound[key] += 1
        return owner

    def unbind(self, session_id: SessionId) -> None:
        """The session has ended here: its key goes with the last session bound to it. Safe to call twice."""
        key = self._key_of.pop(session_id, None)
        if key is None:
            return
        self._bound[key] -= 1
        if not self._bound[key]:
            del self._bound[key]
            self.owners.release(key)

    def settle(self, mine: Callable[[str], bool]) -> None:
        """Unbind the sessions that this worker no longer owns, whoever released them."""
        for session_id in [each for each in self._key_of if not mine(each)]:
            self.unbind(session_id)

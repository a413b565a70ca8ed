"""Which sessions may use a site at once, over all workers of one server.

- `UnmanagedSites` lets everybody in.
- `LockedSites`: sessions that only read share a site, one that may change it has it alone. A session gets all its sites
  or none, and waits its turn.
- `LimitedSites` lets so many sessions of any kind use a site; over that, they are refused.

Each site has a lock file in the server's run directory, held with `flock`: the kernel lets go of it when its worker dies,
so no record of who holds it can be wrong. Who waits holds a numbered ticket, a file locked likewise. The invariant: a
ticket's turn has come when no earlier living ticket wants one of its sites in a way that excludes it. So nobody is
overtaken by a later one that it would have to wait for, a waiting writer is not starved by readers, and one that gave up
or died leaves no hole.

Not here: when a site may be let go of (`session.py`).
"""

from __future__ import annotations

import asyncio
import contextlib
import fcntl
import hashlib
import itertools
import json
import logging
import os
import secrets
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from homing.rundir import close_after_fork
from homing.web.base import SiteLease
from homing.web.errors import CapacityError, SessionConflictError
from homing.web.models import Task

logger = logging.getLogger(__name__)

POLL_SECONDS: Final = 0.05
"""How often a worker that waits looks whether another one has let go: `flock` tells nobody."""

_FLAGS: Final = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
_TICKET: Final = ".ticket"


def sites_of(task: Task) -> tuple[str, ...]:
    """The task's sites as they are locked: trimmed, in lower case, sorted, each once; a task that names none has its
    benchmark's."""
    named = task.site_locks or task.sites
    found = sorted({site.strip().lower() for site in named} - {""})
    return tuple(found) or (f"benchmark:{task.benchmark.strip().lower()}",)


class UnmanagedSites:
    """Lets everybody in, and knows who is in."""

    def __init__(self) -> None:
        self._leases: dict[str, SiteLease] = {}

    async def acquire(self, session_id: str, task: Task) -> SiteLease:
        lease = SiteLease(_lease_id(), session_id, sites_of(task), isolated=False)
        self._leases[lease.lease_id] = lease
        return lease

    async def release(self, lease: SiteLease, *, healthy: bool) -> None:
        self._leases.pop(lease.lease_id, None)

    def health(self) -> Mapping[str, Any]:
        return {"mode": "unmanaged", "leases": len(self._leases)}

    async def aclose(self) -> None:
        self._leases.clear()


@dataclass(slots=True)
class _LockFile:
    """An open file with a lock on it. Closed once, which lets go of the lock."""

    path: str
    descriptor: int
    _keep_in_fork: Callable[[], None] = field(init=False)

    @classmethod
    def open(cls, path: str, flags: int = _FLAGS) -> _LockFile:
        return cls(path, os.open(path, flags, 0o600))

    def __post_init__(self) -> None:
        # A forked child's copy would hold the lock for as long as the child lives.
        self._keep_in_fork = close_after_fork(self.descriptor)

    def try_lock(self, exclusive: bool) -> bool:
        try:
            fcntl.flock(self.descriptor, (fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH) | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def is_there(self) -> bool:
        """Whether the path still leads to this very file: whoever lets go of it last removes it."""
        try:
            found = os.stat(self.path, follow_symlinks=False)
        except FileNotFoundError:
            return False
        mine = os.fstat(self.descriptor)
        return (found.st_dev, found.st_ino) == (mine.st_dev, mine.st_ino)

    def read(self) -> bytes:
        return os.pread(self.descriptor, 65536, 0)

    def write(self, content: bytes) -> None:
        os.pwrite(self.descriptor, content, 0)
        os.ftruncate(self.descriptor, len(content))

    def let_go(self, *, healthy: bool) -> None:
        """Give a site's lock back. Its file stays while others have or want it, and while it says that the site was left in
        an unhealthy state."""
        if self.descriptor < 0:
            return
        if not healthy:
            self.write(b"unhealthy")
        elif self.try_lock(exclusive=True):
            with contextlib.suppress(FileNotFoundError):
                os.unlink(self.path)
        self.close()

    def close(self) -> None:
        if self.descriptor >= 0:
            descriptor, self.descriptor = self.descriptor, -1
            self._keep_in_fork()
            os.close(descriptor)


@dataclass(slots=True, eq=False)
class _Held:
    """A lease and the files that hold its sites."""

    lease: SiteLease
    files: list[_LockFile]

    def let_go(self, *, healthy: bool) -> None:
        for file in self.files:
            file.let_go(healthy=healthy)


class LimitedSites:
    """Lets so many sessions use a site, over all workers; one more is refused rather than kept waiting.

    Args:
        folder: In the run directory; made if missing. Each place at a site is a lock file.
        limit: Places per site.
    """

    def __init__(self, folder: str, limit: int) -> None:
        self._folder = _made(folder)
        self._limit = limit
        self._held: dict[str, _Held] = {}

    async def acquire(self, session_id: str, task: Task) -> SiteLease:
        """See `SitePool`.

        Raises:
            CapacityError: a site is full.
        """
        sites = sites_of(task)
        files: list[_LockFile] = []
        try:
            for site in sites:
                files.append(self._place(site))  # noqa: PERF401  # what was got before one failed is given back
        except BaseException:
            for file in files:
                file.close()
            raise
        held = _Held(SiteLease(_lease_id(), session_id, sites, isolated=False), files)
        self._held[held.lease.lease_id] = held
        return held.lease

    def _place(self, site: str) -> _LockFile:
        for number in range(self._limit):
            file = _locked(os.path.join(self._folder, f"{_digest(site)}.{number}"), exclusive=True)
            if file is not None:
                return file
        raise CapacityError(f"a site of the task has {self._limit} sessions, as many as it may; try again")

    async def release(self, lease: SiteLease, *, healthy: bool) -> None:
        held = self._held.pop(lease.lease_id, None)
        if held is not None:
            held.let_go(healthy=healthy)

    def health(self) -> Mapping[str, Any]:
        return {"mode": "limited", "limit": self._limit, **_sites_in_use(self._held)}

    async def aclose(self) -> None:
        for held in self._held.values():
            held.let_go(healthy=False)
        self._held.clear()


@dataclass(frozen=True, slots=True, order=True)
class _Wanted:
    """What a ticket is for; tickets are served in the order of their numbers."""

    number: int
    name: str
    exclusive: bool
    sites: frozenset[str]

    def excludes(self, other: _Wanted) -> bool:
        return (self.exclusive or other.exclusive) and not self.sites.isdisjoint(other.sites)


@dataclass(slots=True, eq=False)
class _Waiting:
    wanted: _Wanted
    ticket: _LockFile
    sites: tuple[str, ...]
    turn: asyncio.Future[list[_LockFile]]


class LockedSites:
    """Readers and writers of sites, over all workers of a server, first come first served.

    Owns its lock files and its tickets. Waiting is bounded by whoever waits, who is then cancelled.

    Args:
        folder: In the run directory, on a local file system; made if missing.
        poll_seconds: How often it looks for what other workers have let go of, while somebody here waits.
    """

    def __init__(self, folder: str, poll_seconds: float = POLL_SECONDS) -> None:
        self._folder = _made(folder)
        self._poll_seconds = poll_seconds
        self._held: dict[str, _Held] = {}
        self._waiting: list[_Waiting] = []
        self._poller: asyncio.Task[None] | None = None
        self._look = asyncio.Event()
        self._count = itertools.count()
        # Whoever takes a dead worker's place buries its tickets: where nobody waits, nobody else would see them.
        self._others()

    async def acquire(self, session_id: str, task: Task) -> SiteLease:
        """See `SitePool`. Cancelled, it leaves nothing: neither a ticket nor a lock."""
        self._refuse_twice(session_id)
        sites = sites_of(task)
        exclusive = task.mutation_class == "state_changing"
        waiting = self._draw(sites, exclusive)
        self._look_once()
        if not waiting.turn.done():
            self._keep_looking()
        try:
            files = await waiting.turn
        except asyncio.CancelledError:
            self._give_up(waiting)
            raise
        # No await from here on: the locks are in the books below, or were given back above.
        before = {site for site, file in zip(sites, files, strict=True) if file.read()}
        lease = SiteLease(
            _lease_id(),
            session_id,
            sites,
            isolated=exclusive,
            metadata={"mode": "write" if exclusive else "read", "left_unhealthy": sorted(before)},
        )
        self._held[lease.lease_id] = _Held(lease, files)
        return lease

    async def release(self, lease: SiteLease, *, healthy: bool) -> None:
        held = self._held.pop(lease.lease_id, None)
        if held is not None:
            held.let_go(healthy=healthy)
            self._look_once()

    def health(self) -> Mapping[str, Any]:
        return {"mode": "locked", "waiting": len(self._waiting), **_sites_in_use(self._held)}

    async def aclose(self) -> None:
        for waiting in list(self._waiting):
            waiting.turn.set_exception(CapacityError("the server stops"))
            self._give_up(waiting)
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.wait((self._poller,))
        for held in self._held.values():
            held.let_go(healthy=False)
        self._held.clear()

    def _refuse_twice(self, session_id: str) -> None:
        """A session that waits for sites which it has itself would wait for ever."""
        if any(held.lease.session_id == session_id for held in self._held.values()):
            raise SessionConflictError("the session has its sites already")

    # --- tickets ---

    def _draw(self, sites: tuple[str, ...], exclusive: bool) -> _Waiting:
        """A ticket after every other there is: the monotonic clock is one for all processes of a machine.

        It is locked and whole before it has its name, so a ticket without a lock is a dead worker's.
        """
        number = time.monotonic_ns()
        name = f"{number:020d}.{os.getpid()}.{next(self._count)}{_TICKET}"
        path = os.path.join(self._folder, name)
        ticket = _LockFile.open(f"{path}.new", _FLAGS | os.O_EXCL)
        try:
            ticket.try_lock(exclusive=True)
            ticket.write(json.dumps({"exclusive": exclusive, "sites": sites}).encode())
            os.rename(f"{path}.new", path)
        except BaseException:
            self._discard(f"{name}.new", ticket)
            raise
        wanted = _Wanted(number, name, exclusive, frozenset(sites))
        waiting = _Waiting(wanted, ticket, sites, asyncio.get_running_loop().create_future())
        self._waiting.append(waiting)
        return waiting

    def _discard(self, name: str, ticket: _LockFile) -> None:
        with contextlib.suppress(OSError):
            os.unlink(os.path.join(self._folder, name))
        ticket.close()

    def _give_up(self, waiting: _Waiting) -> None:
        """Cancelled while it waited, or in the very moment in which its turn came."""
        if waiting in self._waiting:
            self._waiting.remove(waiting)
            self._discard(waiting.wanted.name, waiting.ticket)
        elif waiting.turn.done() and not waiting.turn.cancelled() and waiting.turn.exception() is None:
            for file in waiting.turn.result():
                file.close()
        self._look_once()

    def _others(self) -> list[_Wanted]:
        """The tickets of living workers. A ticket whose lock can be had is a dead one's, and removed."""
        own = {waiting.wanted.name for waiting in self._waiting}
        found = [waiting.wanted for waiting in self._waiting]
        for name in os.listdir(self._folder):
            if name.endswith(_TICKET) and name not in own:
                other = self._read(name)
                if other is not None:
                    found.append(other)
        return found

    def _read(self, name: str) -> _Wanted | None:
        try:
            file = _LockFile.open(os.path.join(self._folder, name), os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None  # its turn came meanwhile
        try:
            if file.try_lock(exclusive=False):
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(file.path)
                return None
            content = json.loads(file.read())
            return _Wanted(int(name.partition(".")[0]), name, bool(content["exclusive"]), frozenset(content["sites"]))
        finally:
            file.close()

    # --- turns ---

    def _look_once(self) -> None:
        """Give their turn to all whose turn it is."""
        if not self._waiting:
            return
        others = self._others()
        for waiting in list(self._waiting):
            wanted = waiting.wanted
            if any(other.number < wanted.number and other.excludes(wanted) for other in others):
                continue
            files = self._try(waiting.sites, wanted.exclusive)
            if files is None:
                continue
            # The locks are held before the ticket goes: nobody slips in between.
            self._waiting.remove(waiting)
            self._discard(wanted.name, waiting.ticket)
            others.remove(wanted)
            if waiting.turn.cancelled():
                for file in files:
                    file.close()
            else:
                waiting.turn.set_result(files)

    def _try(self, sites: tuple[str, ...], exclusive: bool) -> list[_LockFile] | None:
        files: list[_LockFile] = []
        for site in sites:
            file = _locked(os.path.join(self._folder, f"{_digest(site)}.site"), exclusive=exclusive)
            if file is None:
                for each in files:
                    each.close()
                return None
            files.append(file)
        return files

    def _keep_looking(self) -> None:
        if self._poller is None or self._poller.done():
            self._poller = asyncio.get_running_loop().create_task(self._poll(), name="site locks")

    async def _poll(self) -> None:
        while self._waiting:
            await asyncio.sleep(self._poll_seconds)
            try:
                self._look_once()
            except OSError:
                logger.exception("the site locks cannot be read")

    def __repr__(self) -> str:
        return f"<LockedSites: {len(self._held)} held, {len(self._waiting)} waiting>"


def _made(folder: str) -> str:
    with contextlib.suppress(FileExistsError):
        os.mkdir(folder, 0o700)
    return folder


def _locked(path: str, *, exclusive: bool) -> _LockFile | None:
    """The file with a lock on it, or None if another has it. Made if missing; removed by a holder between our opening and
    locking it, it is made again."""
    while True:
        file = _LockFile.open(path)
        if not file.try_lock(exclusive):
            file.close()
            return None
        if file.is_there():
            return file
        file.close()


def _digest(site: str) -> str:
    return hashlib.sha256(site.encode("utf-8", "surrogatepass")).hexdigest()[:40]


def _lease_id() -> str:
    return secrets.token_hex(8)


def _sites_in_use(held: Mapping[str, _Held]) -> dict[str, Any]:
    counts = Counter(site for each in held.values() for site in each.lease.sites)
    return {"leases": len(held), "sites": dict(sorted(counts.items()))}

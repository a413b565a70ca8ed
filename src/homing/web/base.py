"""The seams of the room: what a session manager is given, and what it gives to each.

- `Backend` plays one session in its browser; `SyncBackend` is the same for drivers that belong to one thread.
- `Runner` is where a backend's operations run: on the event loop behind a gate, or on the one thread of a sync backend.
- `BrowserProvider` supplies browsers as leases; `SitePool` guards sites that sessions change.
- `TaskSet` knows tasks: how one begins on a page, and what the page says of reward and end.
- `Recordings` keeps what people look at afterwards.

The invariants that hold them together: whatever was acquired is released, or kept and tried again; a release that
returns has been seen to be done (`Footprint`); an operation either answers, or raises a `WebError`, or is out of time.

Not here: anything that does it (`manager.py`, `runners.py`, `sites.py`, `processes.py`; Chromium in `chromium/`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, Protocol, TypeAlias

from homing.web.models import Action, ArtifactRef, Observation, StepResult, Task, VerifierResult

# --- one session's environment ---


class Backend(Protocol):
    """One session's task in its browser. The manager runs one operation at a time, each through a `Runner`.

    Every operation answers within the time it was given at making (`BackendSpec.operation_seconds`), whatever the page
    does. An error that is a `WebError` reaches the caller as it is, and ends the session where its class says so; a
    `ValueError` of `reset` is a task's unmet precondition, one of `step` is a bad action, one of `evaluate` an evaluator
    that is not configured; anything else ends the session.
    """

    async def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        """Begin the task, again if it had begun: nothing of an earlier try is left. Observation and info."""
        ...

    async def observe(self) -> Observation:
        """What there is to see now; changes nothing in the page."""
        ...

    async def step(self, action: Action) -> StepResult:
        """Do one action.

        Raises:
            InvalidActionError: it cannot be read, or its ref is of another observation; nothing was tried.
        """
        ...

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        """The verdict. Called until it gives one, which later calls of the session's clients then get too."""
        ...

    async def close(self) -> None:
        """Let go of all that the backend opened itself. Safe to call twice, and after any failure; raises if something
        is left, and is then called again. The browser lease is not its own."""
        ...


class SyncBackend(Protocol):
    """`Backend` for drivers that belong to one thread: the same, called on that thread."""

    def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]: ...

    def observe(self) -> Observation: ...

    def step(self, action: Action) -> StepResult: ...

    def evaluate(self, final_answer: str | None) -> VerifierResult: ...

    def close(self) -> None: ...


AnyBackend: TypeAlias = Backend | SyncBackend


@dataclass(frozen=True, slots=True)
class BackendSpec:
    """What a backend is made of.

    Attributes:
        session_id: Names the session; a secret, so it is shown by its tag only.
        browser: The lease to play in; borrowed.
        recording: Where steps are noted and files may be left; borrowed.
        operation_seconds: What one operation may take, the wait for its turn apart.
    """

    session_id: str
    task: Task
    browser: BrowserHandle
    recording: Recording
    operation_seconds: float


class BackendFactory(Protocol):
    """Makes a session's backend and the runner for it: a sync backend needs a thread of its own, an async one does not."""

    def check(self, task: Task) -> Task:
        """The task as the task set has it, completed.

        Raises:
            InvalidTaskError: no such benchmark or task, or one that says something that cannot be.
        """
        ...

    def backend(self, spec: BackendSpec) -> AnyBackend:
        """Quick and without I/O: `reset`, on the runner, does the work."""
        ...

    def runner(self, session_id: str) -> Runner:
        """Where this backend's operations run; the manager closes it after the backend."""
        ...


@dataclass(frozen=True, slots=True)
class Ran:
    """What an operation gave, and its two times: waiting for its turn is not charged to the operation."""

    value: Any
    waited_seconds: float
    ran_seconds: float


class Runner(Protocol):
    """Where a backend's operations run."""

    async def run(self, operation: Callable[..., Any], *arguments: object, timeout_seconds: float) -> Ran:
        """Run `operation(*arguments)`, a coroutine function for an async backend, a plain one for a sync backend.

        Cancelled while the operation runs, it tells the operation to stop where that can be told (a thread cannot be).

        Raises:
            CapacityError: its turn did not come in time; nothing ran.
            OperationTimeoutError: it ran, and did not end within `timeout_seconds`. It may still be running: only
                `interrupt` of its browser, or its end, makes the runner usable again.
            Exception: what the operation raised.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the thread or the turn. Raises if something still runs on it; safe to call twice."""
        ...


# --- browsers ---


@dataclass(frozen=True, slots=True)
class ProcessMark:
    """One process, this very start of it: a PID alone may be another's by now.

    Attributes:
        started: Clock ticks since boot, as `/proc/<pid>/stat` field 22 has it.
    """

    pid: int
    started: int


@dataclass(slots=True)
class Footprint:
    """What a lease has on this machine, and so what must be gone when it is released. The provider and the backend add
    to it as things come to be; nothing is taken out.

    Attributes:
        processes: The lease's own ones: of a shared browser only its renderers, not the browser.
        folders: Profile, downloads and the like.
    """

    processes: set[ProcessMark] = field(default_factory=set)
    folders: set[Path] = field(default_factory=set)


@dataclass(frozen=True, slots=True)
class BrowserSpec:
    """What a browser is wanted for.

    Attributes:
        lease_seconds: A renewable lease ends by itself so long after its last heartbeat, outside our process.
        options: The provider's own.
    """

    session_id: str
    task: Task
    lease_seconds: float
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True, eq=False)
class BrowserHandle:
    """One lease of a browser.

    Attributes:
        lease_id: Unique among all leases that this process ever had; never reused.
        provider: Its name; transport: how it is reached (`local_process`, `remote_cdp`, …).
        endpoint: Where, if it has an address.
        owner_pid: The process that may use and release it: local browsers are refused elsewhere.
        footprint: The evidence that it is gone is that nothing of this is left.
        state: The provider's own, which its backends understand (a Playwright context).
    """

    lease_id: str
    session_id: str
    provider: str
    transport: str
    endpoint: str | None = None
    owner_pid: int | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)
    footprint: Footprint = field(default_factory=Footprint)
    state: Any = None


class BrowserProvider(Protocol):
    """A supply of browsers.

    Attributes:
        name: As in settings and in `health`.
        renewable: Leases end by themselves unless `heartbeat` is called.
    """

    @property
    def name(self) -> str: ...

    @property
    def renewable(self) -> bool: ...

    async def start(self) -> None:
        """Get ready; called once, before the first `acquire`."""
        ...

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        """A lease. The caller may give up waiting, and never cancels: whatever handle comes late is released.

        Raises:
            CapacityError: none can be had now.
        """
        ...

    async def release(self, handle: BrowserHandle) -> None:
        """End the lease, by force in the end, and return only when it is gone. Safe to call twice and concurrently.

        Raises:
            Exception: it may not be gone; it is called again.
        """
        ...

    async def heartbeat(self, handle: BrowserHandle) -> None:
        """Renew the lease; raises if that could not be done. Not called unless `renewable`."""
        ...

    async def interrupt(self, handle: BrowserHandle) -> None:
        """Make whatever hangs in this lease come back, by ending its renderers if need be; the lease stays, and is
        released as any. Quick, does not raise, and does nothing where nothing can be done."""
        ...

    async def aclose(self) -> None:
        """End every browser there is, leased or not. Safe to call twice."""
        ...

    def health(self) -> Mapping[str, Any]:
        """What to show of it: its binary, its version, what is running."""
        ...


# --- sites ---


@dataclass(frozen=True, slots=True, eq=False)
class SiteLease:
    """The sites that one session has.

    Attributes:
        isolated: Nobody else changes them meanwhile.
    """

    lease_id: str
    session_id: str
    sites: tuple[str, ...]
    isolated: bool
    metadata: Mapping[str, Any] = field(default_factory=dict)


class SitePool(Protocol):
    """Which sessions may use a site at once, over all workers of the server."""

    async def acquire(self, session_id: str, task: Task) -> SiteLease:
        """All of the task's sites or none. Waits its turn where the pool lets one wait; cancelled, it holds nothing.

        Raises:
            CapacityError: they cannot be had, or not in time.
        """
        ...

    async def release(self, lease: SiteLease, *, healthy: bool) -> None:
        """Give them back. Safe to call twice.

        Args:
            healthy: The session ended as it should; if not, the site may be in any state, and a pool may say so to the
                next one (`SiteLease.metadata`).
        """
        ...

    def health(self) -> Mapping[str, Any]: ...

    async def aclose(self) -> None: ...


# --- recordings ---


@dataclass(frozen=True, slots=True)
class RecordedEvent:
    """One thing that happened to a session, in order.

    Attributes:
        kind: `seed`, `reset`, `observe`, `step`, `evaluate`, `close` or `failure`.
        at_seconds: Since the session was seeded.
        waited_seconds, ran_seconds: Of the operation.
        error_kind, error: Where it failed.
    """

    kind: str
    at_seconds: float
    waited_seconds: float = 0.0
    ran_seconds: float = 0.0
    action: Action | None = None
    observation: Observation | None = None
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    verdict: VerifierResult | None = None
    error_kind: str | None = None
    error: str | None = None


class Recording(Protocol):
    """What is kept of one session.

    Attributes:
        folder: Where backend and provider may leave files (videos, traces, screenshots); None: nowhere, nothing is kept.
    """

    @property
    def folder(self) -> Path | None: ...

    def note(self, event: RecordedEvent) -> None:
        """Keep an event. Quick, on the loop, and does not raise."""
        ...

    async def finish(self) -> Sequence[ArtifactRef]:
        """Write what is still to be written and index every file; called once, after the browser has closed and flushed
        them. Off the loop, bounded. Does not raise: what could not be written is listed as failed."""
        ...


class Recordings(Protocol):
    """Where sessions' recordings are kept."""

    def open(self, session_id: str, task: Task) -> Recording:
        """A new session's. Quick: folders are made on first use.

        Raises:
            WebError: recordings are asked for and cannot be made (a missing encoder): the seed is refused, with nothing
                acquired.
        """
        ...


# --- tasks ---


class Page(Protocol):
    """What a task needs of a page; Playwright's async `Page` has it."""

    async def goto(self, url: str) -> object: ...

    async def evaluate(self, expression: str, arg: object = None) -> Any: ...


@dataclass(frozen=True, slots=True)
class Progress:
    """What a task's page says of it.

    Attributes:
        reward: None: none yet.
        done: The task has ended, well or not.
    """

    reward: float | None = None
    done: bool = False
    info: Mapping[str, Any] = field(default_factory=dict)


class TaskSet(Protocol):
    """Tasks of one benchmark. Found by entry point (group `homing.task_sets`): name → a callable without arguments that
    makes one; one per worker, and one that is never started, to see that it can be made. A `ConfigurationError` says why it
    cannot.

    Attributes:
        name: The benchmark's.
        viewport: Its pages' width and height in CSS pixels, so that contexts can be made ready in it; None: any.
    """

    @property
    def name(self) -> str: ...

    @property
    def viewport(self) -> tuple[int, int] | None: ...

    async def start(self) -> None:
        """Serve the pages, if they are this task set's to serve: on loopback, on a free port."""
        ...

    async def aclose(self) -> None: ...

    def task_ids(self) -> Sequence[str]: ...

    def check(self, task: Task) -> Task:
        """The task, completed.

        Raises:
            InvalidTaskError: no such task, or fields it cannot have.
        """
        ...

    def origins(self) -> Sequence[str]:
        """`scheme://host:port` of the pages: a session may go there though it is loopback, and nowhere else on it."""
        ...

    async def begin(self, page: Page, task: Task) -> tuple[str, ...]:
        """Load the task's page and start the task; its goal, one entry per message. Called again, it starts afresh.

        Raises:
            ValueError: the task's precondition does not hold.
        """
        ...

    async def progress(self, page: Page, task: Task) -> Progress:
        """What the page says now."""
        ...

    async def evaluate(self, page: Page, task: Task, final_answer: str | None) -> VerifierResult:
        """The verdict.

        Raises:
            ValueError: the task has no evaluator, or it is not set up.
        """
        ...


PrepareRuntime: TypeAlias = Callable[[], None]
"""Runs once, before the first browser, in a thread: find the binary, make caches. May block."""

TASK_SETS_GROUP: Final = "homing.task_sets"
PROVIDERS_GROUP: Final = "homing.browser_providers"
"""Entry-point group of browser providers: name → a callable that takes the provider's own settings by keyword."""

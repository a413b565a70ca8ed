"""The values of a web session, as they are on the wire and inside: task, observation, step result, verdict, artifact.

pydantic models: FastAPI derives the OpenAPI document from them, and a task set's own fields pass through `Task` as
they came. Unknown fields of a task are kept; those of a request envelope (`server.py`) are refused.

Not here: what an action may be (a backend reads it), and the envelopes of the HTTP surface.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any, Literal, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field

Action: TypeAlias = dict[str, Any] | str
"""What a step is asked to do: `{"action": "click", "ref": "e12"}`, or a call as text, `click('e12')`. The backend
reads it."""


def _stringified(given: object) -> object:
    # A task's ID is a number in some benchmarks' files.
    return str(given) if isinstance(given, int) and not isinstance(given, bool) else given


class SessionStatus(enum.StrEnum):
    """Where a session is in its life; one that no worker knows is `gone`. Replies have words of their own."""

    SEEDING = "seeding"
    LIVE = "live"
    CLOSING = "closing"
    CLOSED = "closed"
    FAILED = "failed"


class WireStatus(enum.StrEnum):
    """A session's `status` as replies say it: in the words that its clients know, and with what runs in it.

    `finished`: its task has ended or been evaluated; `error`: it failed, and is being released.
    """

    CREATING = "creating"
    READY = "ready"
    STEPPING = "stepping"
    FINISHED = "finished"
    ERROR = "error"
    CLOSING = "closing"
    CLOSED = "closed"


class Task(BaseModel):
    """What a session is for. `benchmark` and `task_id` find it in a task set; all else is optional.

    Attributes:
        benchmark: The task set, such as `miniwob`.
        task_id: The task in it; a number is taken as its text.
        seed: What makes the task's variation; None: the task set's default, 0.
        intent: The goal as text, where the task set does not know it.
        start_urls: Pages to open, where the task set does not know them.
        sites: The stateful sites it uses, which a site pool guards.
        site_locks: What to lock in place of `sites`.
        mutation_class: Whether it may change a site: readers share a site, a writer has it alone.
        *_profile: How runtime, observations, actions, verifier and sign-in are to be set up; the backend reads them.
    """

    model_config = ConfigDict(extra="allow", frozen=True)

    benchmark: str = Field(min_length=1, max_length=200)
    task_id: Annotated[str, BeforeValidator(_stringified)] = Field(min_length=1, max_length=500)
    seed: int | None = None
    intent: str | None = None
    start_urls: tuple[str, ...] = ()
    sites: tuple[str, ...] = Field(default=(), max_length=64)
    site_locks: tuple[str, ...] = Field(default=(), max_length=64)
    mutation_class: Literal["read_only", "session_only", "state_changing"] = "state_changing"
    input_images: tuple[str, ...] = ()
    runtime_profile: str | None = None
    observation_profile: str | None = None
    action_profile: str | None = None
    verifier_profile: str | None = None
    auth_profile: str | None = None
    task_kwargs: dict[str, Any] = Field(default_factory=dict)
    original_metadata: dict[str, Any] = Field(default_factory=dict)

    def is_same(self, other: Task) -> bool:
        """Whether both name the same task of the same benchmark, in whatever variation (`seed`)."""
        return (self.benchmark, self.task_id) == (other.benchmark, other.task_id)


class ArtifactRef(BaseModel):
    """One file that a session left: where it is below the artifacts' root, and what is in it.

    Attributes:
        uri: Relative to the root, with `/`; never absolute.
        status: `failed` where it could not be written or read; its size is then 0 and its hash empty.
    """

    uri: str
    mime_type: str
    size_bytes: int
    sha256: str
    status: Literal["complete", "failed"] = "complete"


class Screenshot(BaseModel):
    """A picture of the active page: inline, as a reference to an artifact, or both."""

    mime_type: str = "image/png"
    data_url: str | None = None
    artifact: ArtifactRef | None = None


class Tab(BaseModel):
    index: int
    url: str
    title: str
    active: bool


class Dialog(BaseModel):
    """A dialog that a page opened, and what was done about it."""

    kind: str
    message: str
    handled: str | None = None


class Download(BaseModel):
    """A download that the session started; `status` is `started`, `complete`, `cancelled` or `refused`."""

    name: str
    url: str
    status: str
    size_bytes: int | None = None


class Observation(BaseModel):
    """What an agent sees of the session.

    Attributes:
        observation_id: The `ref`s in `axtree` are valid for this observation only.
        goal: The task's text, one entry per message.
        axtree: The accessibility tree as text, one node a line, with refs; cut at a stated size with a mark.
        truncated: What was cut: any of `axtree`, `dom`, `tabs`, `console_errors`.
        dom: The page's HTML, only where the observation profile asks for it.
        focused_ref: The ref of the focused element.
        dialog: The last dialog since the observation before; `downloads`, `console_errors` likewise.
        file_chooser: A page waits for files, and no upload was asked for.
        last_action_error: Why the last action did not do what it says; empty if it did.
        elapsed_seconds: Since the session was seeded.
        metadata: The backend's own.
    """

    observation_id: str
    goal: tuple[str, ...] = ()
    url: str = ""
    title: str = ""
    tabs: tuple[Tab, ...] = ()
    active_tab: int = 0
    axtree: str = ""
    truncated: tuple[str, ...] = ()
    screenshot: Screenshot | None = None
    dom: str | None = None
    focused_ref: str | None = None
    dialog: Dialog | None = None
    downloads: tuple[Download, ...] = ()
    file_chooser: bool = False
    console_errors: tuple[str, ...] = ()
    last_action: str = ""
    last_action_error: str = ""
    elapsed_seconds: float = 0.0
    metadata: dict[str, Any] = Field(default_factory=dict)


class StepResult(BaseModel):
    """What one action came to, as Gymnasium has it.

    Attributes:
        execution_ok: The action did what it says; if not, the observation's `last_action_error` says why not.
        reward: The benchmark's own for this step; None: it has none yet. A failure of the machinery is an error and
            never a reward.
        terminated: The task has ended; truncated: it was cut off (a limit of steps or of time).
    """

    observation: Observation
    execution_ok: bool = True
    reward: float | None = None
    terminated: bool = False
    truncated: bool = False
    info: dict[str, Any] = Field(default_factory=dict)


class VerifierResult(BaseModel):
    """The verdict on a session's task; there is one at most.

    Attributes:
        valid_sample: The reward measures the agent; false: it must not be trained on, and `failure_kind` says why.
        evidence: What the verdict rests on, as text.
    """

    reward: float
    raw_score: float | None = None
    task_success: bool
    valid_sample: bool = True
    failure_kind: str | None = None
    subscores: dict[str, float] = Field(default_factory=dict)
    evidence: tuple[str, ...] = ()
    verifier_version: str = ""
    metadata: dict[str, Any] = Field(default_factory=dict)


class SeedReply(BaseModel):
    """What a seed gives.

    Attributes:
        info: The backend's, with the site lease's and the browser lease's facts under `site` and `browser`.
    """

    session_id: str
    task_id: str
    status: WireStatus
    observation: Observation
    info: dict[str, Any] = Field(default_factory=dict)


class SessionState(BaseModel):
    """What there is to say about a session without touching it. Times are seconds since the epoch."""

    session_id: str
    benchmark: str
    task_id: str
    status: WireStatus
    created_at: float
    last_access_at: float
    site_lease_id: str | None = None
    browser_lease_id: str | None = None
    browser_provider: str | None = None
    browser_transport: str | None = None

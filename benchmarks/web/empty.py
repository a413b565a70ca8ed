"""A web server with nothing behind it: what manager, HTTP and cookie cost by themselves, and a session's place in memory.

Its observation is as long as the one that the other subjects look at.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any, Final

from homing.web.assembly import Assembly
from homing.web.base import AnyBackend, BackendSpec, BrowserHandle, BrowserSpec, Runner
from homing.web.models import Action, Observation, StepResult, Task, VerifierResult
from homing.web.recording import NoRecordings
from homing.web.runners import LoopRunner, OperationGate
from homing.web.server import WebServer
from homing.web.settings import WebSettings

_LINE: Final = '  [e12] checkbox "some text that is as long as a line of a page" unchecked\n'


class EmptyBackend:
    """Answers at once."""

    def __init__(self) -> None:
        self._seen = Observation(
            observation_id="o1", goal=("Select things and click Submit.",), axtree=_LINE * 14, url="http://127.0.0.1/"
        )

    async def reset(self, task: Task) -> tuple[Observation, dict[str, Any]]:
        return self._seen, {}

    async def observe(self) -> Observation:
        return self._seen

    async def step(self, action: Action) -> StepResult:
        return StepResult(observation=self._seen, reward=0.0)

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        return VerifierResult(reward=0.0, task_success=False)

    async def close(self) -> None:
        pass


class EmptyBackends:
    """Makes them."""

    def __init__(self, settings: WebSettings) -> None:
        self._gate = OperationGate(settings.operations_at_once, settings.wait_seconds)

    def check(self, task: Task) -> Task:
        return task.model_copy(update={"mutation_class": "session_only"})

    def backend(self, spec: BackendSpec) -> AnyBackend:
        return EmptyBackend()

    def runner(self, session_id: str) -> Runner:
        return LoopRunner(self._gate)


class NoBrowsers:
    """Leases of nothing."""

    name = "none"
    renewable = False

    def __init__(self) -> None:
        self._made = 0

    async def start(self) -> None:
        pass

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        self._made += 1
        return BrowserHandle(f"none-{self._made}", spec.session_id, self.name, "none")

    async def release(self, handle: BrowserHandle) -> None:
        pass

    async def heartbeat(self, handle: BrowserHandle) -> None:
        pass

    async def interrupt(self, handle: BrowserHandle) -> None:
        pass

    async def aclose(self) -> None:
        pass

    def health(self) -> Mapping[str, Any]:
        return {}


@asynccontextmanager
async def assemble(settings: WebSettings) -> AsyncIterator[Assembly]:
    yield Assembly(EmptyBackends(settings), NoBrowsers(), NoRecordings())


def server() -> WebServer:
    """What `homing run benchmarks.web.empty:server --factory` serves."""
    return WebServer(assemble, WebSettings(max_sessions=1000))

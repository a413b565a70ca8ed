"""A web server whose sessions count: the real surface, manager and site locks over backends without a browser.

Each lease is a real process (`sleep`), so that what a killed worker leaves can be seen. `task_kwargs` of a task tell the
fakes what is to fail: `{"faults": {"reset": ["raise"]}}`.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from tests.support.web_fakes import FakeBackend, FakeBrowsers, FakeFactory, FakeRecordings, Faults

from homing.web.assembly import Assembly, SiteRule
from homing.web.base import AnyBackend, BackendSpec, BrowserHandle, BrowserSpec, Footprint, ProcessMark
from homing.web.errors import BrowserLostError
from homing.web.models import Task, VerifierResult
from homing.web.processes import browser_environment, end, is_running, mark
from homing.web.server import WebServer
from homing.web.settings import WebSettings


class ProcessBrowsers(FakeBrowsers):
    """Browsers that are `sleep` processes."""

    async def acquire(self, spec: BrowserSpec) -> BrowserHandle:
        for name, kinds in spec.task.task_kwargs.get("faults", {}).items():
            self.faults.add(name, *kinds)
        handle = await super().acquire(spec)
        process = await asyncio.create_subprocess_exec(
            "sleep",
            "1000",
            env=browser_environment(),
            start_new_session=True,
            # Whoever reads the server's log waits for its end, which an orphan would put off.
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.DEVNULL,
        )
        found = mark(process.pid)
        assert found is not None
        made = BrowserHandle(
            handle.lease_id,
            handle.session_id,
            handle.provider,
            "local_process",
            owner_pid=os.getpid(),
            footprint=Footprint({found}),
            state=process,
        )
        self.open[handle.lease_id] = made
        return made

    async def release(self, handle: BrowserHandle) -> None:
        await super().release(handle)
        await asyncio.to_thread(end, list(handle.footprint.processes), 5.0)
        await handle.state.wait()

    async def aclose(self) -> None:
        for handle in list(self.open.values()):
            await self.release(handle)
        await super().aclose()

    def health(self) -> Mapping[str, Any]:
        return {"pids": sorted(process.pid for handle in self.open.values() for process in handle.footprint.processes)}


class ProcessBackend(FakeBackend):
    """Its page is its process: dead, the browser is lost; stopped, it does not answer."""

    async def _operation(self, name: str) -> None:
        await super()._operation(name)
        for process in self.spec.browser.footprint.processes:
            while is_running(process) and is_stopped(process):
                await asyncio.sleep(0.02)
            if not is_running(process):
                raise BrowserLostError("the session's browser has died")

    async def evaluate(self, final_answer: str | None) -> VerifierResult:
        verdict = await super().evaluate(final_answer)
        # Two evaluations can be told apart, so that a doubled one is seen.
        return verdict.model_copy(update={"evidence": (secrets.token_hex(8),)})


class FaultyFactory(FakeFactory):
    def backend(self, spec: BackendSpec) -> AnyBackend:
        return ProcessBackend(self, spec)

    def check(self, task: Task) -> Task:
        checked = super().check(task)
        changes = {"seed": checked.seed or 0}
        # A task without sites changes none: else all of them would wait for one another.
        return checked.model_copy(update=changes if checked.sites else {**changes, "mutation_class": "session_only"})


LATE_SECONDS = 1.5


def is_stopped(process: ProcessMark) -> bool:
    try:
        state = Path(f"/proc/{process.pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state in "tT"


@asynccontextmanager
async def assemble_fakes(settings: WebSettings) -> AsyncIterator[Assembly]:
    faults = Faults()
    faults.late_seconds = LATE_SECONDS
    browsers = ProcessBrowsers(faults)
    yield Assembly(FaultyFactory(faults, browsers), browsers, FakeRecordings(faults))


def server(**changes: Any) -> WebServer:
    """What `homing run tests.support.web_app:server` serves."""
    settings = {"max_sessions": 16, "stop_seconds": 5.0, "operation_seconds": 5.0, "acquire_seconds": 5.0}
    made = WebSettings(**{**settings, **changes.pop("settings", {})})
    return WebServer(assemble_fakes, made, **{"sites": SiteRule("locked"), **changes})


def marks_of(health: Mapping[str, Any]) -> list[ProcessMark]:
    """The processes that a worker's health shows."""
    return [found for pid in health["browser_provider"]["pids"] if (found := mark(pid)) is not None]


def soak_server() -> WebServer:
    """What the fault run serves: every limit short, so that what hangs is over soon."""
    settings = {
        "max_sessions": 40,
        "operation_seconds": 2.0,
        "reset_seconds": 2.0,
        "wait_seconds": 4.0,
        "site_wait_seconds": 4.0,
        "acquire_seconds": 2.0,
        "close_seconds": 1.0,
        "release_seconds": 2.0,
        "retry_seconds": 0.2,
        "max_retry_seconds": 1.0,
        "idle_seconds": 20.0,
        "sweep_seconds": 1.0,
        "stop_seconds": 10.0,
    }
    return server(settings=settings, name="soak")

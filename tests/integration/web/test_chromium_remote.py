"""Sessions in a browser that runs elsewhere, reached by its DevTools endpoint, and what an assembly is made of."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import subprocess
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from tests.support.chromium import SETTINGS, PageTasks, Site, ref_of, require_chromium

from homing.errors import ConfigurationError
from homing.web.chromium.assembly import ChromiumAssembly
from homing.web.chromium.backend import ChromiumBackends
from homing.web.chromium.remote import RemoteProvider
from homing.web.errors import CapacityError, WebError
from homing.web.manager import WebSessionManager
from homing.web.models import Task
from homing.web.recording import NoRecordings
from homing.web.runners import OperationGate
from homing.web.settings import WebSettings
from homing.web.sites import UnmanagedSites

PAGE = "<h1>Here</h1><button onclick='reward = 1'>Go</button>"
SPIN = "<button onclick='while (true) {}'>Spin</button>"


@asynccontextmanager
async def browser_elsewhere(profile: Path) -> AsyncIterator[tuple[subprocess.Popen[bytes], str]]:
    """Somebody's Chromium with a DevTools port."""
    binary = require_chromium()
    process = subprocess.Popen(
        [binary.path, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-port=0", f"--user-data-dir={profile}"],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stderr is not None
    try:
        while line := await asyncio.to_thread(process.stderr.readline):
            if b"DevTools listening on " in line:
                break
        yield process, line.decode().partition(" on ")[2].strip()
    finally:
        process.kill()
        process.stderr.close()
        process.wait()


@asynccontextmanager
async def manager_of(provider: RemoteProvider, tasks: PageTasks, **more: float) -> AsyncIterator[WebSessionManager]:
    await tasks.start()
    settings = WebSettings(**{**SETTINGS, **more})
    backends = ChromiumBackends({"pages": tasks}, OperationGate(2, settings.wait_seconds))
    async with WebSessionManager(
        settings, backends, site_pool=UnmanagedSites(), browser_session_provider=provider, recordings=NoRecordings()
    ) as manager:
        try:
            yield manager
        finally:
            for session_id in ("a", "b", "c"):
                with contextlib.suppress(WebError):
                    await manager.close_session(session_id)
            await tasks.aclose()


def test_sessions_play_in_a_browser_elsewhere_which_stays(tmp_path: Path) -> None:
    async def main() -> None:
        async with browser_elsewhere(tmp_path) as (process, endpoint):
            provider = RemoteProvider(endpoint)
            async with manager_of(provider, PageTasks(Site({"/": PAGE}))) as manager:
                for session_id in ("a", "b"):
                    seen = (await manager.seed_session(session_id, Task(benchmark="pages", task_id="/"))).observation
                    result = await manager.step(session_id, "1", {"action": "click", "ref": ref_of(seen, "Go")})
                    assert (result.reward, result.terminated) == (1.0, True)
                health = (await manager.health())["browser_provider"]
                assert (health["name"], health["contexts"]) == ("remote_cdp", 2)
                assert await manager.close_session("a")
                assert await manager.close_session("b")
                assert provider.health()["contexts"] == 0
            assert process.poll() is None

    asyncio.run(asyncio.wait_for(main(), 90))


def test_a_hung_page_of_a_browser_elsewhere_is_ended_and_its_neighbour_goes_on(tmp_path: Path) -> None:
    async def main() -> None:
        async with browser_elsewhere(tmp_path) as (_, endpoint):
            tasks = PageTasks(Site({"/": PAGE, "/spin": SPIN}))
            async with manager_of(RemoteProvider(endpoint), tasks, operation_seconds=3.0) as manager:
                await manager.seed_session("b", Task(benchmark="pages", task_id="/"))
                seen = (await manager.seed_session("a", Task(benchmark="pages", task_id="/spin"))).observation
                with pytest.raises(WebError):
                    await manager.step("a", "1", {"action": "click", "ref": ref_of(seen, "Spin")})
                assert await manager.close_session("a")
                assert (await manager.step("b", "1", "noop()")).execution_ok

    asyncio.run(asyncio.wait_for(main(), 90))


def test_a_browser_elsewhere_that_goes_is_told_and_another_seed_says_so(tmp_path: Path) -> None:
    async def main() -> None:
        async with (
            browser_elsewhere(tmp_path) as (process, endpoint),
            manager_of(RemoteProvider(endpoint), PageTasks(Site({"/": PAGE}))) as manager,
        ):
            await manager.seed_session("a", Task(benchmark="pages", task_id="/"))
            process.send_signal(signal.SIGKILL)
            process.wait()
            with pytest.raises(WebError) as failure:
                await manager.step("a", "1", "noop()")
            assert failure.value.error_kind in ("browser_lost", "session_conflict", "page_crashed")
            with pytest.raises(CapacityError):
                await manager.seed_session("c", Task(benchmark="pages", task_id="/"))

    asyncio.run(asyncio.wait_for(main(), 90))


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"tasks": ("nothing",)}, "nothing"),
        ({"provider": "nobody"}, "nobody"),
        ({"provider_options": {"isolated": True}}, "isolation"),
        ({"provider_options": {"isolation": "none"}}, "isolation"),
        ({"provider_options": {"warm": -1}}, "warm"),
        ({"provider": "remote_cdp"}, "endpoint"),
        ({"provider": "remote_cdp", "provider_options": {"endpoint": "file:///x"}}, "endpoint"),
    ],
)
def test_an_assembly_that_cannot_be_is_refused_when_it_is_named(arguments: dict[str, object], said: str) -> None:
    with pytest.raises(ConfigurationError, match=said):
        ChromiumAssembly(**{"tasks": ("miniwob",), **arguments})  # type: ignore[arg-type]

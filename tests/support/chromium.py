"""A web manager with real Chromium and local pages, for tests; skips where there is no Chromium.

Pages are given by path, as HTML or as a function of the connection that answers as badly as it likes.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import pytest

from homing.web.base import Page, ProcessMark, Progress
from homing.web.chromium.backend import ChromiumBackends, PlaySettings
from homing.web.chromium.binary import Binary, find_binary
from homing.web.chromium.browser import kind_of
from homing.web.chromium.held import Held
from homing.web.chromium.provider import LocalProvider, LocalSettings
from homing.web.chromium.rules import NavigationRules
from homing.web.errors import BrowserStartError, InvalidTaskError
from homing.web.manager import WebSessionManager
from homing.web.models import Task, VerifierResult
from homing.web.processes import led_by
from homing.web.recording import FolderRecordings, NoRecordings
from homing.web.runners import OperationGate
from homing.web.settings import WebSettings
from homing.web.sites import UnmanagedSites
from homing.web.tasks import Tasks

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

TEST_SECONDS = 90.0
LONG_TEST_SECONDS = 850.0
SETTINGS: dict[str, Any] = {
    "max_sessions": 16,
    "operation_seconds": 10.0,
    "reset_seconds": 30.0,
    "close_seconds": 5.0,
    "release_seconds": 20.0,
    "acquire_seconds": 60.0,
    "stop_seconds": 30.0,
}


def require_chromium() -> Binary:
    """The Chromium there is; skips the test where there is none."""
    pytest.importorskip("playwright", reason="the driver is not installed: pip install 'homing[web]'")
    try:
        return find_binary()
    except BrowserStartError:
        pytest.skip(
            "no Chromium: apt-get install chromium-headless-shell (scripts/setup.sh web does, as root on Debian)"
        )


class Site:
    """Pages on loopback. Counts what is asked of it."""

    def __init__(self, pages: Mapping[str, str | Answer]) -> None:
        self.pages = dict(pages)
        self.asked: list[str] = []
        self.headers: dict[str, str] = {}
        self._server: asyncio.Server | None = None
        self._connections = Tasks()

    @property
    def origin(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def start(self) -> None:
        self._server = await asyncio.start_server(
            lambda reader, writer: self._connections.spawn(self._serve(reader, writer), "site") and None, "127.0.0.1", 0
        )

    async def aclose(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server = None
        await self._connections.aclose(1.0)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
            path = head.split(" ")[1]
            self.asked.append(path)
            self.headers[path] = head
            page = self.pages.get(path.partition("?")[0])
            if page is None:
                writer.write(b"HTTP/1.1 404 Not Found\r\ncontent-length: 0\r\nconnection: close\r\n\r\n")
            elif isinstance(page, str):
                body = page.encode()
                kind = "text/javascript" if path.endswith(".js") else "text/html"
                writer.write(
                    f"HTTP/1.1 200 OK\r\ncontent-type: {kind}; charset=utf-8\r\ncontent-length: {len(body)}\r\n"
                    "connection: close\r\n\r\n".encode()
                    + body
                )
            else:
                await page(reader, writer)
            await writer.drain()
        except (OSError, asyncio.IncompleteReadError):
            pass
        finally:
            writer.close()


class PageTasks:
    """Each page of a site is a task. A page says its reward in `window.reward`, and that it is done by having one."""

    name = "pages"
    viewport = None

    def __init__(self, site: Site) -> None:
        self.site = site
        self.evaluated = 0

    async def start(self) -> None:
        await self.site.start()

    async def aclose(self) -> None:
        await self.site.aclose()

    def task_ids(self) -> Sequence[str]:
        return list(self.site.pages)

    def check(self, task: Task) -> Task:
        if task.task_id not in self.site.pages:
            raise InvalidTaskError("no such page")
        return task

    def origins(self) -> Sequence[str]:
        return (self.site.origin,)

    async def begin(self, page: Page, task: Task) -> tuple[str, ...]:
        await page.goto(self.site.origin + task.task_id)
        return ("look around",)

    async def progress(self, page: Page, task: Task) -> Progress:
        reward = await page.evaluate("window.reward === undefined ? null : window.reward")
        return Progress(reward=0.0 if reward is None else float(reward), done=reward is not None)

    async def evaluate(self, page: Page, task: Task, final_answer: str | None) -> VerifierResult:
        self.evaluated += 1
        progress = await self.progress(page, task)
        return VerifierResult(reward=progress.reward or 0.0, task_success=bool(progress.reward))


class ChromiumWorld:
    """One manager over real browsers."""

    def __init__(
        self,
        site: Site,
        *,
        local: Mapping[str, Any] | None = None,
        rules: NavigationRules | None = None,
        recordings: Path | None = None,
        **settings: Any,
    ) -> None:
        self.site = site
        self.tasks = PageTasks(site)
        made = WebSettings(**{**SETTINGS, **settings})
        self.provider = LocalProvider(
            LocalSettings(**{"warm": 0, **(local or {})}), origins=self.tasks.origins, rules=rules
        )
        play = PlaySettings(rules=rules or NavigationRules(), navigation_seconds=3.0)
        self.backends = ChromiumBackends(
            {"pages": self.tasks}, OperationGate(made.operations_at_once, made.wait_seconds), play
        )
        self.manager = WebSessionManager(
            made,
            self.backends,
            site_pool=UnmanagedSites(),
            browser_session_provider=self.provider,
            recordings=NoRecordings() if recordings is None else FolderRecordings(recordings),
        )
        self._steps = 0

    def url(self, path: str) -> str:
        return self.site.origin + path

    async def seed(self, session_id: str, path: str, **more: Any) -> Any:
        return (await self.manager.seed_session(session_id, Task(benchmark="pages", task_id=path, **more))).observation

    async def step(self, session_id: str, action: Any) -> Any:
        self._steps += 1
        return await self.manager.step(session_id, f"op-{self._steps}", action)

    async def click(self, session_id: str, name: str) -> Any:
        observation = await self.manager.observe(session_id)
        return await self.step(session_id, {"action": "click", "ref": ref_of(observation, name)})

    def held(self, session_id: str) -> Held:
        """What the session's lease holds, so that a test can harm it."""
        session = self.manager._get(session_id)
        assert session.browser is not None
        held: Held = session.browser.state
        return held

    def renderers(self, session_id: str) -> set[ProcessMark]:
        found = set(self.held(session_id).footprint.processes)
        assert found, "the session's renderer is not known"
        return found

    def browser_processes(self) -> list[ProcessMark]:
        return [mark for each in self.provider._browsers if each.process for mark in led_by(each.process)]


def ref_of(observation: Any, name: str) -> str:
    """The ref of the first node with this name."""
    for line in observation.axtree.splitlines():
        if f'"{name}"' in line:
            return str(line.strip().partition("]")[0].removeprefix("["))
    raise AssertionError(f"no {name!r} in\n{observation.axtree}")


@asynccontextmanager
async def chromium_world(pages: Mapping[str, str | Answer], **options: Any) -> AsyncIterator[ChromiumWorld]:
    world = ChromiumWorld(Site(pages), **options)
    await world.tasks.start()
    try:
        async with world.manager:
            yield world
    finally:
        await world.tasks.aclose()


def play(
    pages: Mapping[str, str | Answer],
    script: Callable[[ChromiumWorld], Awaitable[None]],
    *,
    seconds: float = TEST_SECONDS,
    **options: Any,
) -> None:
    """Run a script against a manager with real browsers, and see that nothing of it is left."""
    require_chromium()

    async def main() -> None:
        async with asyncio.timeout(seconds):
            async with chromium_world(pages, **options) as world:
                await script(world)
                processes = world.browser_processes()
                folder = world.provider._folder
            from homing.web.processes import is_running

            assert not [each for each in processes if is_running(each)]
            assert folder is None or not os.path.lexists(folder)

    asyncio.run(main())


class SharedWorld:
    """One world for the tests of a file that harm no more than their own sessions: a browser costs more than most of them do.

    Each test has pages of its own; afterwards its sessions are closed, and nothing of them may be left in the browser.
    """

    def __init__(self, runner: asyncio.Runner, world: ChromiumWorld) -> None:
        self._runner = runner
        self._world = world

    def play(self, pages: Mapping[str, str | Answer], script: Callable[[ChromiumWorld], Awaitable[None]]) -> None:
        """As `play`."""
        self._runner.run(self._play(pages, script))

    async def _play(
        self, pages: Mapping[str, str | Answer], script: Callable[[ChromiumWorld], Awaitable[None]]
    ) -> None:
        world = self._world
        world.site.pages = dict(pages)
        world.tasks.evaluated = 0
        try:
            async with asyncio.timeout(TEST_SECONDS):
                await script(world)
        finally:
            closed = await asyncio.gather(
                *(world.manager.close_session(session.id) for session in world.manager._sessions)
            )
        assert all(closed)
        assert world.provider.health()["contexts"] == 0
        assert not [each for each in world.browser_processes() if kind_of(each) == "renderer"]


@contextmanager
def shared_world(**options: Any) -> Iterator[SharedWorld]:
    """A world that is made when the first test asks for it; see `chromium_world`."""
    require_chromium()
    with asyncio.Runner() as runner:
        around = chromium_world({}, **options)
        shared = SharedWorld(runner, runner.run(_entered(around)))
        yield shared
        runner.run(_left(around))


async def _entered(around: AbstractAsyncContextManager[ChromiumWorld]) -> ChromiumWorld:
    return await around.__aenter__()


async def _left(around: AbstractAsyncContextManager[ChromiumWorld]) -> None:
    await around.__aexit__(None, None, None)

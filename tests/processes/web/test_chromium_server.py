"""`homing web serve` with real Chromium: MiniWoB over HTTP, several workers, and what is left when it is killed."""

from __future__ import annotations

import asyncio
import contextlib
import subprocess
import tempfile
from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import gymnasium
import httpx
import numpy as np
import pytest
from tests.support.chromium import require_chromium
from tests.support.running import HOMING, ROOT, Running, environment, running

from homing.web.client import WebCallError, WebSession
from homing.web.environment import Env
from homing.web.miniwob.solver import OBSERVATION_PROFILE, solvable, solve
from homing.web.miniwob.task_set import MiniwobTasks

SERVE = (*HOMING, "web", "serve")
CLICK = {"benchmark": "miniwob", "task_id": "click-button", "seed": 3}
QUICK = (
    "click-button", "click-checkboxes", "enter-text", "choose-list", "email-inbox-reply", "use-slider", "drag-box",
    "click-shape", "count-shape", "copy-paste", "choose-date-easy", "login-user",
)  # fmt: skip


@contextlib.contextmanager
def serving(*arguments: str, workers: int = 2) -> Iterator[Running]:
    require_chromium()
    with running("--tasks", "miniwob", "--workers", str(workers), *arguments, cwd=ROOT, command=SERVE) as started:
        started.wait_for("Application startup complete", workers)
        yield started


@pytest.fixture(scope="module")
def recordings() -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="h-recordings-") as folder:
        yield Path(folder)


@pytest.fixture(scope="module")
def url(recordings: Path) -> Iterator[str]:
    with serving("--recordings", str(recordings)) as server:
        yield f"http://127.0.0.1:{server.port}"


async def play(url: str, task_id: str, seed: int) -> tuple[float, int]:
    """Reward and steps of one episode, played by the scripted solver over HTTP."""
    async with WebSession(url) as session:
        observation = await session.seed(
            {"benchmark": "miniwob", "task_id": task_id, "seed": seed, "observation_profile": OBSERVATION_PROFILE}
        )
        agent = await solve(session, task_id, observation)
        return (await session.evaluate()).reward, agent.steps


def solved_of(url: str, task_ids: tuple[str, ...] | list[str], seeds: tuple[int, ...]) -> set[str]:
    async def main() -> set[str]:
        solved: set[str] = set()
        waiting = iter(task_ids)

        async def player() -> None:
            for task_id in waiting:
                for seed in seeds:
                    reward, steps = await play(url, task_id, seed)
                    if reward > 0:
                        assert steps > 0
                        solved.add(task_id)
                        break

        async with asyncio.TaskGroup() as group:
            for _ in range(3):
                group.create_task(player())
        return solved

    return asyncio.run(main())


def test_tasks_are_solved_over_http_by_observations_and_actions_alone(url: str) -> None:
    assert solved_of(url, QUICK, (0, 1)) == set(QUICK)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_a_hundred_tasks_are_solved(url: str) -> None:
    solved = solved_of(url, solvable(), (0, 1, 2))
    assert len(solved) >= 100, sorted(set(solvable()) - solved)


@pytest.mark.long
@pytest.mark.timeout(1200)
def test_every_task_can_be_begun_and_looks_the_same_each_time(url: str) -> None:
    """But those whose pages move or draw by themselves."""
    moving = {
        "chase-circle",
        "moving-items",
        "click-pie",
        "click-pie-nodelay",
        "stock-market",
        "simon-says",
        "terminal",
    }

    async def main() -> None:
        task_ids = MiniwobTasks().task_ids()
        assert len(task_ids) == 130
        for task_id in task_ids:
            texts = []
            for _ in range(2):
                async with WebSession(url) as session:
                    seen = await session.seed({"benchmark": "miniwob", "task_id": task_id, "seed": 5})
                    assert seen.goal[0]
                    texts.append(seen.axtree)
            assert task_id in moving or texts[0] == texts[1], task_id

    asyncio.run(main())


def test_the_same_task_and_seed_is_the_same_text(url: str) -> None:
    async def main() -> None:
        seen = []
        for _ in range(3):
            async with WebSession(url) as session:
                seen.append((await session.seed({**CLICK, "observation_profile": "layout"})).axtree)
        assert len(set(seen)) == 1

    asyncio.run(main())


@pytest.mark.parametrize(
    ("task", "kind"),
    [
        ({"benchmark": "none", "task_id": "x"}, "invalid_task"),
        ({"benchmark": "miniwob", "task_id": "none"}, "invalid_task"),
        ({"benchmark": "miniwob", "task_id": "../core/core"}, "invalid_task"),
        ({**CLICK, "observation_profile": "everything"}, "invalid_task"),
        ({**CLICK, "runtime_profile": "viewport=9x9"}, "invalid_task"),
        ({**CLICK, "task_kwargs": {"script": "alert(1)"}}, "invalid_task"),
        ({**CLICK, "start_urls": ["http://a.example"]}, "invalid_task"),
    ],
)
def test_a_task_that_cannot_be_is_refused(url: str, task: dict[str, object], kind: str) -> None:
    async def main() -> None:
        session = WebSession(url)
        try:
            with pytest.raises(WebCallError) as refusal:
                await session.seed(task)
            assert refusal.value.error_kind == kind
        finally:
            await session.aclose()

    asyncio.run(main())


def test_bad_actions_leave_the_session_as_it_was(url: str) -> None:
    async def main() -> None:
        async with WebSession(url) as session:
            seen = await session.seed(CLICK)
            for action, kind in (
                ({"action": "fly"}, "invalid_action"),
                ({"action": "click", "ref": "e99999"}, "stale_ref"),
                ({"action": "evaluate", "script": "core.endEpisode(1)"}, "invalid_action"),
                ("click(core.endEpisode(1))", "invalid_action"),
            ):
                with pytest.raises(WebCallError) as refusal:
                    await session.step(action)
                assert (refusal.value.status, refusal.value.error_kind) == (400, kind)
            result = await session.step({"action": "goto", "url": "javascript:core.endEpisode(1)"})
            assert (result.execution_ok, result.terminated) == (False, False)
            result = await session.step({"action": "noop"})
            assert (result.observation.axtree, result.reward) == (seen.axtree, 0.0)

    asyncio.run(main())


@contextlib.asynccontextmanager
async def cutting(url: str, path: str) -> AsyncIterator[str]:
    """A way to the server on which the first reply to a request for `path` is lost, though the request arrived."""
    host, port = url.removeprefix("http://").split(":")
    cut: list[str] = []
    tasks: set[asyncio.Task[None]] = set()

    async def carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there_reader, there_writer = await asyncio.open_connection(host, int(port))
        try:
            while request := await reader.read(65_536):
                there_writer.write(request)
                answer = await there_reader.read(1_048_576)
                if request.startswith(f"POST {path} ".encode()) and not cut:
                    cut.append(path)
                    return
                writer.write(answer)
                await writer.drain()
        finally:
            writer.close()
            there_writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.get_running_loop().create_task(carry(reader, writer))
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    listener = await asyncio.start_server(accept, "127.0.0.1", 0)
    try:
        yield f"http://127.0.0.1:{listener.sockets[0].getsockname()[1]}"
        assert cut
    finally:
        listener.close()
        for task in list(tasks):
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)


@pytest.mark.parametrize("path", ["/seed_session", "/step", "/close"])
def test_a_call_whose_reply_was_lost_is_sent_again_and_done_once(url: str, path: str) -> None:
    async def main() -> None:
        async with cutting(url, path) as way, WebSession(way) as session:
            seen = await session.seed({"benchmark": "miniwob", "task_id": "click-checkboxes", "seed": 0})
            line = next(line for line in seen.axtree.splitlines() if "] checkbox" in line)
            result = await session.step({"action": "click", "ref": line.strip()[1:].partition("]")[0]})
            # Clicked twice it would not be.
            assert result.observation.axtree.count(" checked") == 1

    asyncio.run(main())


def test_the_health_names_the_browser(url: str) -> None:
    health = httpx.get(f"{url}/healthz", trust_env=False).json()
    browser = health["browser_provider"]
    assert browser["name"] == "local_process"
    assert Path(browser["binary"]).is_file()
    assert browser["kind"] in ("given", "headless-shell", "chromium", "playwright")
    assert any(character.isdigit() for character in browser["version"])


def test_an_environment_has_browsergyms_keys_and_gymnasiums_manners(url: str) -> None:
    env = Env(url, {"benchmark": "miniwob", "task_id": "click-test"}, screenshot=True)
    try:
        observation, info = env.reset(seed=1)
        assert env.observation_space.contains(observation)
        assert {
            "chat_messages", "goal", "goal_object", "open_pages_urls", "active_page_index", "url", "screenshot",
            "dom_object", "axtree_object", "focused_element_bid", "last_action", "last_action_error", "elapsed_time",
        } <= observation.keys()  # fmt: skip
        assert observation["goal"] == "Click the button."
        assert (observation["screenshot"].shape, observation["screenshot"].dtype) == ((320, 500, 3), np.uint8)
        assert info["session_id"]
        ref = next(line for line in observation["axtree_txt"].splitlines() if "] button" in line).partition("]")[0][1:]
        _, reward, terminated, truncated, _ = env.step("noop()")
        assert (reward, terminated, truncated) == (0.0, False, False)
        with pytest.raises(WebCallError):
            env.step("click('nonsense')")
        observation, reward, terminated, truncated, info = env.step(f"click('{ref}')")
        assert (reward, terminated, truncated) == (1.0, True, False)
        assert info["raw_reward"] > 0
        again, _ = env.reset(seed=2)
        assert again["last_action"] == ""
        assert isinstance(env, gymnasium.Env)
    finally:
        env.close()
        env.close()


def test_a_closed_session_has_a_recording_and_a_page(url: str, recordings: Path) -> None:
    async def main() -> str:
        session = WebSession(url)
        async with session:
            await session.seed(CLICK)
            named = session.session_id
            await session.step("noop(100)")
        assert {artifact.uri.rpartition("/")[2] for artifact in session.artifacts} >= {"events.jsonl", "session.json"}
        assert all(not artifact.uri.startswith("/") and ".." not in artifact.uri for artifact in session.artifacts)
        assert named is not None
        return named

    session_id = asyncio.run(main())
    done = subprocess.run(
        [*HOMING, "web", "replay", session_id, "--recordings", str(recordings)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    page = Path(done.stdout.strip()).read_text()
    assert "click-button" in page
    assert session_id not in page
    done = subprocess.run(
        [*HOMING, "web", "replay", "--sheet", "--recordings", str(recordings)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert Path(done.stdout.strip()).read_bytes().startswith(b"\x89PNG")
    unknown = subprocess.run(
        [*HOMING, "web", "replay", "nobody", "--recordings", str(recordings)],
        env=environment(), capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert unknown.returncode == 2
    assert "no recording" in unknown.stderr

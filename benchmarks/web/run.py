"""Measures browser sessions, and writes `rounds.json` and `results.md` beside this file. `question.md` says what and why."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import importlib.metadata
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.forwarding.setups import free_port
from benchmarks.spread import spread, table
from benchmarks.web.measure import browsers_memory, cpu_seconds
from playwright.async_api import async_playwright

from homing.web.chromium.binary import find_binary
from homing.web.client import WebSession
from homing.web.miniwob.task_set import MiniwobTasks

HERE: Final = Path(__file__).parent
TASK: Final = {"benchmark": "miniwob", "task_id": "click-checkboxes", "seed": 0}
START_SECONDS: Final = 120.0

Row = dict[str, float]


@contextlib.asynccontextmanager
async def server(*more: str) -> AsyncIterator[tuple[str, int]]:
    """`homing web serve` with one worker; its address and its process."""
    port = free_port()
    command = ["-m", "homing", "web", "serve", "--tasks", "miniwob", "--workers", "1", "--port", str(port)]
    process = subprocess.Popen(
        [sys.executable, *command, "--no-access-log", "--max-sessions", "64", *more],
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        async with asyncio.timeout(START_SECONDS):
            while True:
                with contextlib.suppress(OSError):
                    _, writer = await asyncio.open_connection("127.0.0.1", port)
                    writer.close()
                    break
                await asyncio.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(60)


async def cpu_of(pids: tuple[int, ...], work: Awaitable[object]) -> float:
    before = cpu_seconds(*pids)
    await work
    return cpu_seconds(*pids) - before


def checkbox(text: str) -> str:
    return next(line for line in text.splitlines() if "] checkbox" in line).strip()[1:].partition("]")[0]


async def click(session: WebSession, count: int) -> None:
    assert session.observation is not None
    ref = checkbox(session.observation.axtree)
    for _ in range(count):
        result = await session.step({"action": "click", "ref": ref})
        assert result.execution_ok, result.observation.last_action_error


async def homing_steps(url: str, pid: int, steps: int, profile: str) -> float:
    """CPU-ms per step, over HTTP."""
    async with WebSession(url) as session:
        await session.seed({**TASK, "observation_profile": profile})
        await click(session, 3)
        return 1000 * await cpu_of((pid, os.getpid()), click(session, steps)) / steps


async def homing_many(url: str, pid: int, sessions: int, steps: int) -> float:
    """CPU-ms per step with so many live sessions that step all at once."""
    async with contextlib.AsyncExitStack() as stack:
        live = [await stack.enter_async_context(WebSession(url)) for _ in range(sessions)]
        for session in live:
            await session.seed(TASK)
        each = max(1, steps // sessions)
        work = asyncio.gather(*(click(session, each) for session in live))
        return 1000 * await cpu_of((pid, os.getpid()), work) / (each * sessions)


async def homing_seeds(url: str, pid: int, count: int) -> float:
    """CPU-ms per seed and close, contexts kept ready."""

    async def seeds() -> None:
        for number in range(count):
            async with WebSession(url) as session:
                await session.seed({**TASK, "seed": number})

    return 1000 * await cpu_of((pid, os.getpid()), seeds()) / count


async def memory_per_session(url: str, pid: int, sessions: int) -> float:
    """MiB of a session more."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(WebSession(url))
        await first.seed(TASK)
        before = browsers_memory(pid)
        for _ in range(sessions):
            session = await stack.enter_async_context(WebSession(url))
            await session.seed(TASK)
        return (browsers_memory(pid) - before) / sessions / 2**20


async def bare_steps(page: Any, steps: int, *, picture: bool) -> float:
    """CPU-ms per step of Playwright alone."""

    async def work() -> None:
        box = page.locator("#area input[type=checkbox]").first
        for _ in range(steps):
            await box.click()
            await page.locator("body").aria_snapshot()
            if picture:
                await page.screenshot(type="jpeg")

    return 1000 * await cpu_of((os.getpid(),), work()) / steps


async def cold_launch(playwright: Any, binary: str, url: str) -> float:
    """CPU-ms of a browser's launch with its first page, and of its end."""

    async def work() -> None:
        browser = await playwright.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page()
        await page.goto(url)
        await browser.close()

    return 1000 * await cpu_of((os.getpid(),), work())


class Peer:
    """BrowserGym in its own process."""

    def __init__(self, python: str, binary: str, pages: str) -> None:
        self._process = subprocess.Popen(
            [python, str(HERE / "peer.py")],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
            env={**os.environ, "CHROMIUM": binary, "MINIWOB_URL": f"{pages}/miniwob/"},
        )  # fmt: skip

    def ask(self, command: str) -> dict[str, float]:
        assert self._process.stdin is not None
        if command:
            self._process.stdin.write(command + "\n")
            self._process.stdin.flush()
        return self._answer()

    def _answer(self) -> dict[str, float]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the peer has ended")
        answer: dict[str, float] = json.loads(line)
        return answer

    def close(self) -> None:
        for stream in (self._process.stdin, self._process.stdout):
            assert stream is not None
            stream.close()
        self._process.wait(60)


async def measure(rounds: int, steps: int) -> dict[str, Any]:
    binary = str((await asyncio.to_thread(find_binary)).path)
    pages = MiniwobTasks()
    await pages.start()
    origin = pages.origins()[0]
    page_url = f"{origin}/miniwob/click-checkboxes.html"
    rows: list[Row] = []
    skipped = None
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(pages.aclose)
        url, pid = await stack.enter_async_context(server())
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        recorded_url, recorded_pid = await stack.enter_async_context(server("--recordings", folder))
        playwright = await stack.enter_async_context(async_playwright())
        peer = None
        python = os.environ.get("BROWSERGYM_PYTHON")
        if python:
            peer = Peer(python, binary, origin)
            stack.callback(peer.close)
            try:
                await asyncio.to_thread(peer.ask, "")
            except RuntimeError:
                peer, skipped = None, "BrowserGym did not start"
        else:
            skipped = "BrowserGym is not measured: BROWSERGYM_PYTHON names no Python that has browsergym-miniwob"
        browser = await playwright.chromium.launch(executable_path=binary, args=["--no-sandbox", "--disable-gpu"])
        page = await browser.new_page()
        await page.goto(page_url)
        await page.evaluate("core.EPISODE_MAX_TIME = 1e6; core.startEpisodeReal()")
        for number in range(rounds):
            row: Row = {}
            began = time.monotonic()
            row["homing_text"] = await homing_steps(url, pid, steps, "axtree")
            row["bare_text"] = await bare_steps(page, steps, picture=False)
            row["homing_picture"] = await homing_steps(url, pid, steps, "screenshot=jpeg")
            row["bare_picture"] = await bare_steps(page, steps, picture=True)
            row["homing_recorded"] = await homing_steps(recorded_url, recorded_pid, steps, "axtree")
            row["two_sessions"] = await homing_many(url, pid, 2, steps)
            row["many_sessions"] = await homing_many(url, pid, 32, 2 * steps)
            row["warm_seed"] = await homing_seeds(url, pid, 5)
            row["cold_launch"] = await cold_launch(playwright, binary, page_url)
            row["session_mib"] = await memory_per_session(url, pid, 8)
            if peer is not None:
                asked = peer

                async def ask(command: str, asked: Peer = asked) -> dict[str, float]:
                    return await asyncio.to_thread(asked.ask, command)

                row["browsergym"] = 1000 * (await ask(f"step {max(3, steps // 4)}"))["cpu"]
                row["browsergym_reset"] = 1000 * (await ask("reset 2"))["cpu"]
                row["browsergym_mib"] = (await ask("memory"))["pss"] / 2**20
            rows.append(row)
            print(f"round {number + 1}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        await browser.close()
    return {
        "machine": machine.described(playwright=importlib.metadata.version("playwright")),
        "binary": binary,
        "rounds": rows,
        "skipped": skipped,
        "steps": steps,
    }


def results(measured: dict[str, Any]) -> str:
    rounds: list[Row] = measured["rounds"]

    def shown(name: str, digits: int = 1) -> str:
        return spread([row[name] for row in rounds]).text(digits)

    def ratio(over: Callable[[Row], float]) -> str:
        return spread([over(row) for row in rounds]).text(2)

    has_peer = "browsergym" in rounds[0]
    lines = [
        "# Browser sessions: results",
        "",
        f"{len(rounds)} interleaved rounds of {measured['steps']} steps. `question.md` says what was measured.",
        "",
    ]
    costs = [
        ("homing over HTTP, text", "homing_text"), ("bare Playwright, text", "bare_text"),
        ("homing over HTTP, text and JPEG", "homing_picture"), ("bare Playwright, text and JPEG", "bare_picture"),
        ("homing, text, recorded", "homing_recorded"), ("homing, 2 live sessions", "two_sessions"),
        ("homing, 32 live sessions", "many_sessions"), ("homing, a warm seed and its close", "warm_seed"),
        ("a cold launch with its first page", "cold_launch"),
    ]  # fmt: skip
    if has_peer:
        costs += [("BrowserGym, a step", "browsergym"), ("BrowserGym, a reset", "browsergym_reset")]
    lines.append(
        table(("CPU-ms, all processes", "median (95 % interval)"), [(name, shown(key)) for name, key in costs])
    )
    goals = [
        ("CPU per step, text, over bare Playwright's", "", ratio(lambda row: row["homing_text"] / row["bare_text"])),
        ("32 live sessions over 2, CPU per step", "≤ 1.25", ratio(lambda row: row["many_sessions"] / row["two_sessions"])),
        ("recorded over not, CPU per step", "≤ 1.10", ratio(lambda row: row["homing_recorded"] / row["homing_text"])),
        ("a warm seed over a cold launch, CPU", "≤ 0.25", ratio(lambda row: row["warm_seed"] / row["cold_launch"])),
        ("sessions per GiB", "", ratio(lambda row: 1024 / row["session_mib"])),
    ]  # fmt: skip
    if has_peer:
        goals += [
            ("BrowserGym's step over homing's with a picture", "≥ 4", ratio(lambda row: row["browsergym"] / row["homing_picture"])),
            ("BrowserGym's step over homing's as text", "≥ 8", ratio(lambda row: row["browsergym"] / row["homing_text"])),
            ("BrowserGym's reset over homing's warm seed", "", ratio(lambda row: row["browsergym_reset"] / row["warm_seed"])),
            ("sessions per GiB over BrowserGym's", "≥ 20", ratio(lambda row: row["browsergym_mib"] / row["session_mib"])),
        ]  # fmt: skip
    lines += ["", table(("ratio, formed in each round", "goal", "median (95 % interval)"), goals), ""]
    if measured["skipped"]:
        lines += [measured["skipped"] + ".", ""]
    lines += [f"Chromium: `{measured['binary']}`. {machine.text(measured['machine'])}", ""]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    measured = asyncio.run(measure(options.rounds, options.steps))
    (options.out / "rounds.json").write_text(json.dumps(measured, indent=1) + "\n")
    (options.out / "results.md").write_text(results(measured))


if __name__ == "__main__":
    main()

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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import httpx
from benchmarks import machine
from benchmarks.forwarding.setups import free_port
from benchmarks.spread import spread, table
from benchmarks.web.faults import bounds
from benchmarks.web.measure import browsers_memory, cpu_seconds, own_cpu_seconds, own_memory
from playwright.async_api import async_playwright

from homing.web.chromium.binary import find_binary
from homing.web.client import WebSession
from homing.web.miniwob.task_set import MiniwobTasks

HERE: Final = Path(__file__).parent
TASK: Final = {"benchmark": "miniwob", "task_id": "click-checkboxes", "seed": 0}
START_SECONDS: Final = 120.0
READY: Final = 12
"""Contexts that the server of `ready_seeds` keeps ready."""
IDLE_SESSIONS: Final = 200
OWN_BROWSERS: Final = 4
PEER: Final = HERE.parents[1] / ".venv-browsergym" / "bin" / "python"
"""Where `scripts/setup.sh browsergym` puts it; BROWSERGYM_PYTHON names another."""

Row = dict[str, float]


@contextlib.asynccontextmanager
async def server(*more: str) -> AsyncIterator[tuple[str, int]]:
    """`homing web serve` with one worker; its address and its process."""
    async with served("web", "serve", "--tasks", "miniwob", "--max-sessions-per-worker", "64", *more) as there:
        yield there


@contextlib.asynccontextmanager
async def served(*command: str) -> AsyncIterator[tuple[str, int]]:
    """A homing command with one worker; its address and its process."""
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "homing", *command, "--workers", "1", "--port", str(port), "--no-access-log"],
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


async def click(session: WebSession, count: int, ran: list[float] | None = None) -> None:
    assert session.observation is not None
    ref = checkbox(session.observation.axtree)
    for _ in range(count):
        result = await session.step({"action": "click", "ref": ref})
        assert result.execution_ok, result.observation.last_action_error
        if ran is not None:
            ran.append(result.info["ran_seconds"])


async def homing_steps(url: str, pid: int, steps: int, profile: str) -> float:
    """CPU-ms per step, over HTTP."""
    async with WebSession(url) as session:
        await session.seed({**TASK, "observation_profile": profile})
        await click(session, 3)
        return 1000 * await cpu_of((pid, os.getpid()), click(session, steps)) / steps


async def homing_many(url: str, pid: int, sessions: int, steps: int) -> Row:
    """So many live sessions that step all at once: CPU-ms per step, steps per second, and an operation's own run time."""
    async with contextlib.AsyncExitStack() as stack:
        live = [await stack.enter_async_context(WebSession(url)) for _ in range(sessions)]
        for session in live:
            await session.seed(TASK)
        each = max(1, steps // sessions)
        ran: list[float] = []
        began = time.monotonic()
        cpu = await cpu_of((pid, os.getpid()), asyncio.gather(*(click(session, each, ran) for session in live)))
        seconds = time.monotonic() - began
        ran.sort()
        return {
            "cpu": 1000 * cpu / len(ran),
            "rate": len(ran) / seconds,
            "tail": ran[int(0.95 * (len(ran) - 1))] / ran[len(ran) // 2],
        }


async def homing_seeds(url: str, pid: int, count: int) -> float:
    """CPU-ms per seed and close, and of the context that is made ready in its place."""

    async def seeds() -> None:
        for number in range(count):
            async with WebSession(url) as session:
                await session.seed({**TASK, "seed": number})

    return 1000 * await cpu_of((pid, os.getpid()), seeds()) / count


async def ready_seeds(url: str, pid: int) -> tuple[float, float]:
    """CPU-ms and seconds (the slowest) of a seed that finds a context ready, its close and the next context apart."""
    async with contextlib.AsyncExitStack() as stack:
        # Below half of those kept ready, others would be made meanwhile.
        live = [await stack.enter_async_context(WebSession(url)) for _ in range(READY // 2 - 1)]
        async with asyncio.timeout(START_SECONDS), httpx.AsyncClient(base_url=url) as client:
            while (await client.get("/healthz")).json()["browser_provider"].get("warm", 0) < READY:
                first = await stack.enter_async_context(WebSession(url))
                await first.seed(TASK)
                await first.close()
                await asyncio.sleep(0.5)
        await asyncio.sleep(0.5)
        times: list[float] = []

        async def seeds() -> None:
            for number, session in enumerate(live):
                began = time.monotonic()
                await session.seed({**TASK, "seed": number})
                times.append(time.monotonic() - began)

        return 1000 * await cpu_of((pid, os.getpid()), seeds()) / len(live), max(times)


async def server_alone(url: str, pid: int, steps: int) -> tuple[float, float]:
    """CPU-ms of the server's process per step with nothing behind it, and KiB of it per idle session."""
    async with contextlib.AsyncExitStack() as stack:
        session = await stack.enter_async_context(WebSession(url))
        await session.seed(TASK)
        for _ in range(10):
            await session.step({"action": "noop"})
        before = own_cpu_seconds(pid)
        for _ in range(steps):
            await session.step({"action": "noop"})
        cpu = 1000 * (own_cpu_seconds(pid) - before) / steps
        memory = own_memory(pid)
        for _ in range(IDLE_SESSIONS):
            idle = await stack.enter_async_context(WebSession(url))
            await idle.seed(TASK)
        return cpu, (own_memory(pid) - memory) / IDLE_SESSIONS / 1024


async def memory_per_session(url: str, pid: int, sessions: int) -> tuple[float, float]:
    """MiB of a session more: in the browser's processes, and in the server's own."""
    async with contextlib.AsyncExitStack() as stack:
        first = await stack.enter_async_context(WebSession(url))
        await first.seed(TASK)
        before, server_before = browsers_memory(pid), own_memory(pid)
        for _ in range(sessions):
            session = await stack.enter_async_context(WebSession(url))
            await session.seed(TASK)
        after, server_after = browsers_memory(pid), own_memory(pid)
        return (after - before) / sessions / 2**20, (server_after - server_before) / sessions / 2**20


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
        ready = await stack.enter_async_context(server("--provider-option", f"warm={READY}"))
        empty = await stack.enter_async_context(served("run", "benchmarks.web.empty:server", "--factory"))
        own = await stack.enter_async_context(server("--provider-option", "isolation=browser"))
        playwright = await stack.enter_async_context(async_playwright())
        peer = None
        python = os.environ.get("BROWSERGYM_PYTHON") or (str(PEER) if PEER.exists() else None)
        if python:
            peer = Peer(python, binary, origin)
            stack.callback(peer.close)
            try:
                await asyncio.to_thread(peer.ask, "")
            except RuntimeError:
                peer, skipped = None, "BrowserGym did not start"
        else:
            skipped = (
                "BrowserGym is not measured: it is not installed (scripts/setup.sh browsergym, or BROWSERGYM_PYTHON)"
            )
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
            for name, count in (("two", 2), ("many", 32)):
                found = await homing_many(url, pid, count, max(count * 4, 2 * steps))
                row |= {f"{name}_{key}": value for key, value in found.items()}
            row["whole_seed"] = await homing_seeds(url, pid, 5)
            row["ready_seed"], row["ready_seed_seconds"] = await ready_seeds(*ready)
            row["cold_launch"] = await cold_launch(playwright, binary, page_url)
            row["session_mib"], row["session_server_mib"] = await memory_per_session(url, pid, 8)
            row["own_browser_mib"], _ = await memory_per_session(*own, OWN_BROWSERS)
            row["server_step"], row["idle_session_kib"] = await server_alone(*empty, 5 * steps)
            if peer is not None:
                asked = peer

                async def ask(command: str, asked: Peer = asked) -> dict[str, float]:
                    return await asyncio.to_thread(asked.ask, command)

                row["browsergym"] = 1000 * (await ask(f"step {max(3, steps // 4)}"))["cpu"]
                reset = await ask("reset 3")
                row["browsergym_reset"], row["browsergym_reset_seconds"] = 1000 * reset["cpu"], reset["seconds"]
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
        "load": os.getloadavg()[0],
    }


@dataclass(frozen=True, slots=True)
class Goal:
    """One goal: what is measured in each round, and what it has to be; `best` is `most` or `least` that it may be."""

    name: str
    what: str
    bound: float | None
    best: str
    of: Callable[[Row], float]

    def row(self, rounds: list[Row]) -> tuple[str, str, str, str, str]:
        """Of the page's table."""
        try:
            found = spread([self.of(each) for each in rounds])
        except KeyError:
            return self.name, self.what, self._shown(), "not measured", "–"
        verdict = "–"
        if self.bound is not None:
            held = found.median <= self.bound if self.best == "most" else found.median >= self.bound
            verdict = "reached" if held else "**missed**"
        return self.name, self.what, self._shown(), found.text(2), verdict

    def _shown(self) -> str:
        return "" if self.bound is None else f"{'≤' if self.best == 'most' else '≥'} {self.bound:g}"


GOALS: Final = (
    Goal("G1", "BrowserGym's CPU per step over ours, both with text and picture", 4, "least",
         lambda row: row["browsergym"] / row["homing_picture"]),
    Goal("G1", "BrowserGym's CPU per step over ours as text", 8, "least",
         lambda row: row["browsergym"] / row["homing_text"]),
    Goal("", "our CPU per step as text over bare Playwright's", None, "most",
         lambda row: row["homing_text"] / row["bare_text"]),
    Goal("", "our CPU per step with a picture over bare Playwright's", None, "most",
         lambda row: row["homing_picture"] / row["bare_picture"]),
    Goal("G2", "CPU of a seed that finds a context ready over a cold launch's", 0.25, "most",
         lambda row: row["ready_seed"] / row["cold_launch"]),
    Goal("", "CPU of a seed with its close and the next context over a cold launch's", None, "most",
         lambda row: row["whole_seed"] / row["cold_launch"]),
    Goal("G2", "slowest of the ready seeds over BrowserGym's mean reset, seconds", 0.1, "most",
         lambda row: row["ready_seed_seconds"] / row["browsergym_reset_seconds"]),
    Goal("", "BrowserGym's CPU per reset over our seed with all that it entails", None, "least",
         lambda row: row["browsergym_reset"] / row["whole_seed"]),
    Goal("G3", "sessions per GiB over BrowserGym's, contexts of one browser, same Chromium", 20, "least",
         lambda row: row["browsergym_mib"] / row["session_mib"]),
    Goal("G3", "sessions per GiB over BrowserGym's, a browser for each", 5, "least",
         lambda row: row["browsergym_mib"] / row["own_browser_mib"]),
    Goal("", "our sessions per GiB, contexts of one browser", None, "least", lambda row: 1024 / row["session_mib"]),
    Goal("G4", "CPU per step at 32 live sessions over that at 2", 1.25, "most",
         lambda row: row["many_cpu"] / row["two_cpu"]),
    Goal("G4", "steps per second at 32 live sessions over those at 2", 0.9, "least",
         lambda row: row["many_rate"] / row["two_rate"]),
    Goal("G4", "95th percentile of an operation's own run time over its median, at 32", 3, "most",
         lambda row: row["many_tail"]),
    Goal("G5", "CPU of manager, HTTP and cookie over that of a whole step", 0.1, "most",
         lambda row: row["server_step"] / row["homing_text"]),
    Goal("G5", "the same, ms", 3, "most", lambda row: row["server_step"]),
    Goal("G5", "memory of an idle session in the server, no browser, MiB", 1, "most",
         lambda row: row["idle_session_kib"] / 1024),
    Goal("", "memory of a session in the server's process, browser's objects with it, MiB", None, "most",
         lambda row: row["session_server_mib"]),
    Goal("G6", "CPU per step recorded over not", 1.1, "most", lambda row: row["homing_recorded"] / row["homing_text"]),
)  # fmt: skip

COSTS: Final = (
    ("homing over HTTP, text", "homing_text"), ("bare Playwright, text", "bare_text"),
    ("homing over HTTP, text and JPEG", "homing_picture"), ("bare Playwright, text and JPEG", "bare_picture"),
    ("homing, text, recorded", "homing_recorded"),
    ("homing, 2 live sessions", "two_cpu"), ("homing, 32 live sessions", "many_cpu"),
    ("homing's server with nothing behind it", "server_step"),
    ("homing, a seed that finds a context ready", "ready_seed"),
    ("homing, a seed, its close, and the next context", "whole_seed"),
    ("a cold launch with its first page, and its end", "cold_launch"),
    ("BrowserGym, a step", "browsergym"), ("BrowserGym, a reset", "browsergym_reset"),
)  # fmt: skip


def results(measured: dict[str, Any]) -> str:
    rounds: list[Row] = measured["rounds"]
    costs = [
        (name, spread([row[key] for row in rounds]).text(1)) for name, key in COSTS if all(key in row for row in rounds)
    ]
    lines = [
        "# Browser sessions: results",
        "",
        f"{len(rounds)} interleaved rounds of {measured['steps']} steps. `question.md` says what was measured, and why a goal is "
        "missed.",
        "",
        table(("goal", "ratio or figure, formed in each round", "bound", "median (95 % interval)", ""),
              [goal.row(rounds) for goal in GOALS]),
        "",
        table(("CPU-ms, all processes", "median (95 % interval)"), costs),
        "",
    ]  # fmt: skip
    if measured["skipped"]:
        lines += [measured["skipped"] + ".", ""]
    lines += [
        "Under faults (`faults.md`):",
        "",
        *bounds(),
        "",
        "Long runs: `long.md`.",
        "",
        f"Chromium: `{measured['binary']}`. Load average at the end: {measured['load']:.1f}. {machine.text(measured['machine'])}",
        "",
    ]
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--page", action="store_true", help="only make the page again, from the rounds that are there")
    options = parser.parse_args()
    if options.page:
        (options.out / "results.md").write_text(results(json.loads((options.out / "rounds.json").read_text())))
        return
    measured = asyncio.run(measure(options.rounds, options.steps))
    (options.out / "rounds.json").write_text(json.dumps(measured, indent=1) + "\n")
    (options.out / "results.md").write_text(results(measured))


if __name__ == "__main__":
    main()

"""Long runs, each as long as it is told to be; writes `long.json` and `long.md` beside this file.

    python -m benchmarks.web.long --sessions 500 --checks 100000 --repeats 10 --load 8

- *sessions*: so many are seeded and closed on one browser; its memory and processes before and after.
- *checks*: so many looks for what another session left (cookies, storages, caches, databases, names, permissions, channels), over 32
  live sessions that come and go at random, each with a token of its own in every one of these places.
- *repeats*: each deterministic task begun so often from one seed, its text compared to the byte, with and without `load` processes
  that do nothing but work.

0 leaves a run out, and what an earlier one found of it. A million checks take about a day on two cores, so the size is in the result.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from benchmarks import machine
from benchmarks.spread import table
from benchmarks.web.measure import browser_processes, browsers_memory
from benchmarks.web.run import TASK, server
from tests.support.chromium import Answer, ChromiumWorld, chromium_world

from homing.web.client import WebSession
from homing.web.miniwob.task_set import MiniwobTasks
from homing.web.models import Observation

HERE: Final = Path(__file__).parent
LIVE: Final = 32
PLACES: Final = 9
AT_ONCE: Final = 4
FLAKY: Final = frozenset({"chase-circle", "moving-items", "click-pie"})
"""Pages that differ between two loads with one seed."""

LOOKS: Final = """<p id=p>…</p><script>
(async () => {
  const mine = new URLSearchParams(location.search).get('token');
  const found = [];
  const saw = (place, text) => { if (text && !String(text).split(',').every((each) => each === mine)) found.push(place) };
  saw('cookie', document.cookie.replace(/token=/g, '').replace(/; /g, ','));
  saw('localStorage', localStorage.token);
  saw('sessionStorage', sessionStorage.token);
  saw('caches', (await caches.keys()).join());
  saw('indexedDB', (await indexedDB.databases()).map((each) => each.name).join());
  saw('window.name', window.name);
  saw('files', await (async () => { const names = []; for await (const name of (await navigator.storage.getDirectory()).keys())
    names.push(name); return names.join() })().catch(() => ''));
  saw('cached reply', await (await fetch('/token?of=all')).text());
  saw('channel', await new Promise((done) => { const channel = new BroadcastChannel('token');
    channel.onmessage = (event) => { if (event.data !== mine) done(event.data) }; setTimeout(() => done(''), 250) }));
  document.cookie = 'token=' + mine + '; max-age=9999';
  localStorage.token = sessionStorage.token = window.name = mine;
  await caches.open(mine);
  await new Promise((done) => { const open = indexedDB.open(mine); open.onsuccess = open.onerror = done });
  await navigator.storage.getDirectory().then((root) => root.getFileHandle(mine, { create: true })).catch(() => 0);
  window.channel = new BroadcastChannel('token');
  window.ticking = setInterval(() => window.channel.postMessage(mine), 100);
  p.textContent = found.length ? 'foreign: ' + found.join() : 'nothing foreign';
})();
</script>"""


async def many_sessions(count: int) -> dict[str, float]:
    """One browser's memory and processes after 20 sessions, and after so many more."""
    async with server("--provider-option", "sessions_per_browser=1000000") as (url, pid):

        async def some(number: int) -> tuple[int, int]:
            for seed in range(number):
                async with WebSession(url) as session:
                    await session.seed({**TASK, "seed": seed})
            await asyncio.sleep(2.0)
            return browsers_memory(pid), browser_processes(pid)

        before, after = await some(20), await some(count)
    return {
        "sessions": count,
        "mib_before": before[0] / 2**20,
        "mib_after": after[0] / 2**20,
        "processes_before": before[1],
        "processes_after": after[1],
    }


async def isolation(checks: int, seed: int) -> dict[str, Any]:
    """Looks for what another session left."""
    draw = random.Random(seed)
    done = sessions = 0
    foreign: list[str] = []

    async def token(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        # A reply that may be kept for ever, and is another one each time: who gets it from a cache sees who asked first.
        writer.write(
            b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ncache-control: max-age=99999\r\ncontent-length: 0\r\n"
            b"connection: close\r\n\r\n"
        )

    # How long a look takes is no matter here: a busy machine must not end the run.
    limits = {"operation_seconds": 60.0, "reset_seconds": 120.0, "wait_seconds": 300.0, "acquire_seconds": 300.0}
    pages: dict[str, str | Answer] = {"/start": "<p>start</p>", "/looks": LOOKS, "/token": token}
    async with chromium_world(pages, local={"warm": 4}, max_sessions=LIVE + 8, **limits) as world:
        live: list[str] = []
        while done < checks:
            if len(live) < LIVE and draw.random() < 0.5:
                sessions += 1
                name = f"token{sessions}"
                await world.seed(name, "/start")  # a look without its token would leave another one
                live.append(name)
            elif len(live) > 2 and draw.random() < 0.1:
                await world.manager.close_session(live.pop(draw.randrange(len(live))))
                continue
            elif not live:
                continue
            names = draw.sample(live, min(AT_ONCE, len(live)))
            for text in await asyncio.gather(*(_look(world, name) for name in names)):
                done += PLACES
                if "nothing foreign" not in text:
                    foreign.append(text[:200])
        for name in live:
            await world.manager.close_session(name)
    return {"checks": done, "sessions": sessions, "foreign": foreign, "seed": seed}


async def _look(world: ChromiumWorld, name: str) -> str:
    await world.step(name, {"action": "goto", "url": world.url(f"/looks?token={name}")})
    result = await world.step(name, {"action": "wait_for", "text": "foreign", "milliseconds": 10_000})
    return str(result.observation.axtree)


async def determinism(repeats: int) -> dict[str, Any]:
    """How often the same task and seed gave the same text."""
    tasks = [each for each in MiniwobTasks().task_ids() if each not in FLAKY]
    same = 0
    other: list[str] = []
    async with server() as (url, _):
        for task_id in tasks:
            task = {"benchmark": "miniwob", "task_id": task_id, "seed": 7}
            first = (await _seen(url, task)).axtree
            for _ in range(repeats):
                if (await _seen(url, task)).axtree == first:
                    same += 1
                else:
                    other.append(task_id)
    return {"repeats": repeats * len(tasks), "same": same, "other": sorted(set(other))}


async def _seen(url: str, task: dict[str, Any]) -> Observation:
    async with WebSession(url) as session:
        return await session.seed(task)


@contextlib.contextmanager
def working(processes: int) -> Iterator[None]:
    """So many processes that do nothing but work."""
    found = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for process in found:
            process.kill()
            process.wait()


def page(found: dict[str, Any]) -> str:
    rows: list[tuple[str, ...]] = []
    if memory := found.get("memory"):
        ratio = memory["mib_after"] / memory["mib_before"]
        rows.append(
            (
                f"{memory['sessions']:.0f} sessions on one browser: memory, processes",
                "≤ 1.10, as many",
                f"{ratio:.2f} ({memory['mib_before']:.0f} to {memory['mib_after']:.0f} MiB), "
                f"{memory['processes_before']} to {memory['processes_after']}",
            )
        )
    if isolated := found.get("isolation"):
        rows.append(
            (
                f"looks for what another session left, {isolated['sessions']} sessions, {LIVE} at once",
                "0 of 1,000,000",
                f"{len(isolated['foreign'])} of {isolated['checks']:,}",
            )
        )
    for name, how in (("determinism_alone", "alone"), ("determinism_loaded", "beside working processes")):
        if repeated := found.get(name):
            share = f"{100 * repeated['same'] / repeated['repeats']:.2f} % of {repeated['repeats']:,}"
            others = f" (not: {', '.join(repeated['other'])})" if repeated["other"] else ""
            rows.append((f"same task and seed, same text, {how}", "≥ 99.9 %", share + others))
    lines = [
        "# Browser sessions: long runs",
        "",
        "Made by `python -m benchmarks.web.long`, whose head says what each is.",
        "",
    ]
    lines += [table(("run", "goal", "found"), rows), "", machine.text(found["machine"]), ""]
    return "\n".join(lines)


async def run(options: argparse.Namespace) -> None:
    """Each part is written as soon as it is done."""
    file = options.out / "long.json"
    found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
    found["machine"] = machine.described()

    def write(part: str, result: dict[str, Any]) -> None:
        found[part] = result
        file.write_text(json.dumps(found, indent=1) + "\n")
        (options.out / "long.md").write_text(page(found))

    if options.sessions:
        write("memory", await many_sessions(options.sessions))
    if options.checks:
        write("isolation", await isolation(options.checks, options.seed))
    if options.repeats:
        write("determinism_alone", await determinism(options.repeats))
        if options.load:
            with working(options.load):
                write("determinism_loaded", await determinism(options.repeats))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sessions", type=int, default=500)
    parser.add_argument("--checks", type=int, default=20_000)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--load", type=int, default=8)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args()
    asyncio.run(run(options))


if __name__ == "__main__":
    main()

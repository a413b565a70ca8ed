"""Every path that homing gives to the system while clients, peers and records say the worst: a program of its own.

Prints, as JSON, how many texts were tried, how many calls were seen, and each call whose path leads out of the run
directory. An audit hook sees what opens, makes, removes, renames and connects; `readlink`, `stat` and `lstat`, of which Python
audits nothing, are wrapped. A hook cannot be taken away again, so this is not done in the process of the tests.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import re
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from random import Random
from typing import Any, Final

from tests.support.lifespans import lifespan_of
from tests.support.seed_servers import ManualClock, agent_app, install_agent, install_resources, resources_app

from homing.errors import HomingError
from homing.identity.specs import body, cookie, header, path, query
from homing.routing.options import RoutingOptions
from homing.routing.sticky import build
from homing.rundir import boot_id, new_worker_id
from homing.types import SESSION, ASGIApp, Message, Receive, Scope, Send, WorkerId, key_digest

# What lies in a run directory, by names relative to it or to the records' directory in it.
EXPECTED: Final = re.compile(
    r"[0-9a-f]{64}|\.?[0-9a-f]{32}\.(sock|conn|life|stopping|drained)|\.[0-9a-f]{32}\.\d+|owners\.lock|session-owners|\."
)

PIECES: Final = (
    *(
        "..",
        "../",
        "/",
        "//",
        "\\",
        "~",
        ".",
        "%2F",
        "%2e%2e%2f",
        "\x00",
        "\n",
        "\r\n",
        " ",
        "'",
        '"',
        ";",
        "*",
        "$(id)",
    ),
    *("/etc/passwd", "/proc/self/environ", "/dev/zero", "file://", "session-owners", "owners.lock", ".life", ".sock"),
    *(
        "0123456789abcdef" * 2,
        "F" * 32,
        "é",
        "🦉",
        "\ud800",
        "\x1b[31m",
        "a" * 300,
        "rollouts/x",
        "ng-rollout/",
        "{}",
        "null",
    ),
)


class Calls:
    """The paths that were given to the system while it was `on`."""

    def __init__(self, directory: str) -> None:
        self.directory = directory
        self.on = False
        self.seen: Counter[str] = Counter()
        self.outside: list[tuple[str, str]] = []

    def note(self, what: str, *paths: object) -> None:
        if not self.on:
            return
        for given in paths:
            if given is None or isinstance(given, int):
                continue  # a descriptor
            self.seen[what] += 1
            text = os.fsdecode(given) if isinstance(given, str | bytes | os.PathLike) else repr(given)
            if not self.inside(text):
                self.outside.append((what, text))

    def inside(self, text: str) -> bool:
        if not text.startswith("/"):
            return EXPECTED.fullmatch(text) is not None
        if text in (self.directory, os.devnull) or text.endswith((".py", ".pyc")):
            return True  # source: a traceback shows its lines
        at, _, name = text.rpartition("/")
        return at in (self.directory, f"{self.directory}/session-owners") and EXPECTED.fullmatch(name) is not None

    def audit(self, event: str, given: tuple[Any, ...]) -> None:
        if not self.on:
            return
        if event in (
            "open",
            "os.listdir",
            "os.scandir",
            "os.mkdir",
            "os.rmdir",
            "os.remove",
            "os.chmod",
            "os.truncate",
        ):
            self.note(event, given[0])
        elif event == "os.symlink":
            self.note(event, given[1])  # what it says leads nowhere: it is read, and never followed
        elif event in ("os.rename", "os.link"):
            self.note(event, given[0], given[1])
        elif event in ("socket.connect", "socket.bind") and isinstance(given[1], str | bytes):
            self.note(event, given[1])
        elif event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn"):
            self.note(event, str(given))

    def wrapped(self, name: str) -> Callable[..., Any]:
        real: Callable[..., Any] = getattr(os, name)

        def call(given: Any, *args: Any, **options: Any) -> Any:
            self.note(name, given)
            return real(given, *args, **options)

        return call


def texts(random: Random, count: int) -> Iterator[str]:
    for _ in range(count):
        yield "".join(random.choice(PIECES) for _ in range(random.randint(1, 5)))


async def echo(scope: Scope, receive: Receive, send: Send) -> None:
    if scope["type"] == "lifespan":
        for what in ("startup", "shutdown"):
            await receive()
            await send({"type": f"lifespan.{what}.complete"})
        return
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def scope_of(method: str, target: str, headers: list[tuple[bytes, bytes]], query_string: bytes = b"") -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        "root_path": "",
        "method": method,
        "path": target,
        "raw_path": target.encode("utf-8", "surrogateescape") if target.isascii() else b"/",
        "query_string": query_string,
        "headers": headers,
    }


async def ask(app: ASGIApp, scope: Scope, data: bytes = b"") -> int:
    """The status of the reply."""
    asked = [{"type": "http.request", "body": data, "more_body": False}]
    status = 0

    async def receive() -> Message:
        return asked.pop() if asked else {"type": "http.disconnect"}

    async def send(message: Message) -> None:
        nonlocal status
        if message["type"] == "http.response.start":
            status = message["status"]

    await app(scope, receive, send)
    return status


def worst(text: str) -> bytes:
    return text.encode("utf-8", "surrogatepass")


async def say_it(generic: list[ASGIApp], kinds: list[ASGIApp], text: str, random: Random) -> list[int]:
    """The text in every place where a request may name a session, a worker or a path key."""
    raw = worst(text)
    app = random.choice(generic)
    fields = json.dumps({"session": text}).encode()
    statuses = [
        await ask(app, scope_of("GET", "/", [(b"x-session", raw)])),
        await ask(app, scope_of("GET", "/", [(b"cookie", b"sid=" + raw)])),
        await ask(app, scope_of("GET", "/", [], b"session=" + raw)),
        await ask(app, scope_of("GET", f"/sessions/{text}", [])),
        await ask(app, scope_of("POST", "/named", [(b"content-length", b"%d" % len(fields))], b""), fields),
    ]
    for kind in kinds:
        named = [(b"x-ng-session-owner", raw), (b"cookie", b"Counter___srv=" + raw), (b"x-test-session-token", raw)]
        statuses.append(await ask(kind, scope_of("GET", "/session", random.sample(named, 2))))
        statuses.append(await ask(kind, scope_of("POST", f"/rollouts/{text}/stop", [])))
        seed = json.dumps(
            {
                "resources_session_id": text,
                "agent_session_id": text,
                "episode_id": {"rollout_id": text},
            }
        ).encode()
        for target in ("/seed_session", "/v1/agent_sessions", f"/ng-rollout/{text}/seed_session"):
            head = [(b"content-type", b"application/json"), (b"content-length", b"%d" % len(seed))]
            statuses.append(await ask(kind, scope_of("POST", target, head), seed))
    return statuses


async def main(count: int, seed: int) -> dict[str, Any]:
    random = Random(seed)
    with tempfile.TemporaryDirectory(prefix="homing-paths-", dir="/tmp", ignore_cleanup_errors=True) as directory:
        calls = Calls(directory)
        sources = (
            header("x-session"),
            cookie("sid"),
            query("session"),
            path("/sessions/{session}"),
            body("session", "/named"),
        )
        options = RoutingOptions(sessions=sources, unowned="adopt", socket_dir=directory, workers=2)
        statuses: Counter[int] = Counter()
        async with AsyncExitStack() as stack:
            generic = [build(echo, options) for _ in range(2)]
            clock = ManualClock()
            kinds: list[ASGIApp] = []
            for make, install in ((resources_app, install_resources), (agent_app, install_agent)):
                kind = make(clock)
                install(kind, directory, clock)
                kinds.append(kind)
            apps: list[ASGIApp] = [*generic, *kinds]
            for app in apps:
                await stack.enter_async_context(lifespan_of(app))
            sys.addaudithook(calls.audit)
            for name in ("readlink", "stat", "lstat"):
                setattr(os, name, calls.wrapped(name))
            await say_it(list(generic), kinds, "warm", random)  # what is imported late
            calls.on = True
            for number, text in enumerate(texts(random, count)):
                with contextlib.suppress(ValueError):  # what no server passes on: a path or a header of lone surrogates
                    statuses.update(await say_it(list(generic), kinds, text, random))
                # A record that says it, and a peer that asks in its name.
                session = f"spoiled {number}"
                calls.on = False
                try:
                    record = os.path.join(directory, "session-owners", key_digest(SESSION, session))
                    with contextlib.suppress(ValueError, OSError):
                        os.symlink(f"{boot_id()}.{text}" if number % 2 else text or "x", record)
                finally:
                    calls.on = True
                statuses[await ask(generic[0], scope_of("GET", "/", [(b"x-session", session.encode())]))] += 1
                worker = generic[number % 2].worker
                assert worker is not None
                mine = f"mine {number}"
                statuses[await ask(generic[number % 2], scope_of("GET", "/", [(b"x-session", mine.encode())]))] += 1
                hung_up = asyncio.Event()
                with contextlib.suppress(HomingError, ValueError):
                    await worker.owners.give(mine, WorkerId(text), timeout_seconds=0.1, hung_up=hung_up)
                statuses[await ask(generic[0], scope_of("GET", "/", [(b"x-session", mine.encode())]))] += 1
            # A give to a worker that there is, and a request for one that there is not.
            giver, taker = generic[0].worker, generic[1].worker
            assert giver is not None
            assert taker is not None
            statuses[await ask(generic[0], scope_of("GET", "/", [(b"x-session", b"given")]))] += 1
            await giver.owners.give("given", taker.id, timeout_seconds=1.0, hung_up=asyncio.Event())
            named = [(b"x-ng-session-owner", new_worker_id().encode())]
            statuses.update([await ask(kind, scope_of("GET", "/session", named)) for kind in kinds])
            calls.on = False
        return {
            "tried": count,
            "seen": dict(calls.seen),
            "statuses": {str(status): times for status, times in statuses.items()},
            "outside": calls.outside[:20],
        }


if __name__ == "__main__":
    print(json.dumps(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2])))))

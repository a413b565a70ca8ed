"""Two workers of one server, each with a public port of its own, and a plain server beside them.

The arriving worker is the client's choice here: a session is started at `owner`'s port, so a request of it sent to
`owner` is served where it arrives, and the same bytes sent to `front` go through a forced forward, or through a connection
that has moved from `front` to `owner`. The plain server runs the same app without homing, under uvicorn's own server. All
three are processes; both workers are `homing.sticky` apps of one run directory (`HOMING_SESSION_SOCKET_DIR`), as siblings
under a launcher would be, in the server that `homing run` gives its workers.

Their listening sockets are made here and handed down, so a client connects before they have started and nothing polls.
"""

from __future__ import annotations

import base64
import itertools
import os
import pickle
import shutil
import signal
import socket
import ssl
import subprocess
import sys
import tempfile
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Final

from tests.support.raw import Address, Wire, connect, request
from tests.support.recorder import DEATH, NAME_ENV, STAGE_ENV, Recorder, Stage, open_stage
from tests.support.servers import LEFT_BEHIND, ROOT, STARTED, ServerError, ServerProcess, run_process

from homing.types import ASGIApp

SESSION_HEADER: Final = "x-session"
SOCKET_DIR_ENV: Final = "HOMING_SESSION_SOCKET_DIR"
HOMING: Final = os.environ.get("HOMING_TEST_PAIR", "homing")
"""`plain`: no worker routes. The suite must hold then too, which shows that the harness itself is stable."""


@dataclass(frozen=True)
class WorkerOptions:
    """What one worker serves; pickled to its process.

    Attributes:
        sticky: Keyword arguments of `homing.sticky`; None serves the app alone. `sessions` and `learn` hold calls, such as
            `("header", "x-session")`, since sources are made in the worker.
        wrap: Made around the app inside homing (a name in `WRAPPERS`).
        server: Keyword arguments of `uvicorn.Config`.
        shares: It forwards small requests over shared connections, however few there are at once.
    """

    sticky: dict[str, Any] | None
    wrap: str | None = None
    server: dict[str, Any] = field(default_factory=dict)
    shares: bool = False

    def build(self) -> ASGIApp:
        app: ASGIApp = Recorder()
        if self.wrap is not None:
            app = WRAPPERS[self.wrap](app)
        if self.sticky is not None:
            import homing

            settings = dict(self.sticky)
            for places in ("sessions", "learn"):
                settings[places] = [_source(*call) for call in settings.get(places, ())]
            app = homing.sticky(app, **settings)
        return app


def _source(name: str, *values: Any) -> Any:
    """`("signed_cookie", "session", "sid", {"secret": …})` made a source; a last value that is a dict holds keywords."""
    import homing

    keywords = values[-1] if values and isinstance(values[-1], dict) else {}
    return getattr(homing, name)(*(value for value in values if value is not keywords), **keywords)


def _mounted(app: ASGIApp) -> ASGIApp:
    from starlette.applications import Starlette
    from starlette.routing import Mount

    return Starlette(routes=[Mount("/mounted", app=app)])


def _signed_cookies(app: ASGIApp) -> ASGIApp:
    from starlette.middleware.sessions import SessionMiddleware
    from tests.support.cookie_app import CookieApp

    return SessionMiddleware(CookieApp(app), secret_key=COOKIE_SECRET)


COOKIE_SECRET: Final = "a secret of the tests"
WRAPPERS: Final[dict[str, Callable[[ASGIApp], ASGIApp]]] = {"mounted": _mounted, "cookies": _signed_cookies}


@dataclass(frozen=True)
class PairOptions:
    """How a pair and its plain twin are set up.

    Attributes:
        sticky: Keyword arguments of `homing.sticky`; `sessions` and `learn` as in `WorkerOptions`.
        wrap: A name in `WRAPPERS`.
        server: Keyword arguments of `uvicorn.Config`, for all three.
        tls: Serve with a certificate made for the test.
        shares: A further worker forwards small requests over a shared connection to `owner`.
    """

    sticky: Mapping[str, Any] = field(default_factory=dict)
    wrap: str | None = None
    server: Mapping[str, Any] = field(default_factory=dict)
    tls: bool = False
    shares: bool = False


@dataclass
class Worker:
    """One of the processes."""

    name: str
    address: Address
    process: ServerProcess

    @property
    def pid(self) -> int:
        return self.process.pid

    def memory_bytes(self) -> tuple[int, int]:
        """Resident memory now, and the highest so far since `forget_peak` (`/proc/PID/status`: VmRSS, VmHWM)."""
        text = Path(f"/proc/{self.pid}/status").read_text()
        found = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in text.splitlines() if line.startswith("Vm")}
        return found["VmRSS"], found["VmHWM"]

    def forget_peak(self) -> None:
        Path(f"/proc/{self.pid}/clear_refs").write_text("5")

    def descriptors(self) -> int:
        return len(os.listdir(f"/proc/{self.pid}/fd"))


@dataclass
class Pair:
    """The workers, and the stage that their recorders talk to. Made by `open_pair`.

    Attributes:
        front: Forwards what is `owner`'s.
        plain: Unrouted.
        sharing: As `front`, and over a shared connection.
    """

    stage: Stage
    front: Worker
    owner: Worker
    plain: Worker
    sharing: Worker | None
    socket_dir: str
    tls: ssl.SSLContext | None
    options: PairOptions
    _numbers: itertools.count[int] = field(default_factory=itertools.count)

    def number(self) -> int:
        """A number that no other case of this pair has."""
        return next(self._numbers)

    @property
    def workers(self) -> list[Worker]:
        return [self.front, self.owner, self.plain, *([] if self.sharing is None else [self.sharing])]

    def connect(self, worker: Worker, **options: Any) -> Any:
        return connect(worker.address, tls=self.tls, **options)

    async def share(self, sharing: Worker) -> None:
        """Have `sharing` make its connection to `owner`, which its first request there begins."""
        session = await self.start_session()
        for _ in range(3):
            async with self.connect(sharing) as wire:
                await wire.send(request("GET", self.path("/"), [(SESSION_HEADER, session)]))
                assert (await wire.reply()).status == 200

    async def start_session(self, at: Worker | None = None) -> str:
        """A new session's ID, owned by `owner` (or the worker given) once this returns."""
        worker = at or self.owner
        session = f"session-{worker.name}-{self.number():06}"
        async with self.connect(worker) as wire:
            assert isinstance(wire, Wire)
            await wire.send(request("GET", self.path("/"), [(SESSION_HEADER, session)]))
            reply = await wire.reply()
        words = reply.body.split()
        assert reply.status == 200, f"{reply!r}{worker.process.log}"
        assert words == [worker.name.encode(), str(worker.pid).encode()], f"{words} is not {worker}"
        return session

    def path(self, path: str) -> str:
        return "/mounted" + path if self.options.wrap == "mounted" else path


@asynccontextmanager
async def open_pair(options: PairOptions | None = None) -> AsyncIterator[Pair]:
    """Start the workers, and end them: each must exit in an orderly way and leave nothing behind."""
    options = options or PairOptions()
    base = Path("/dev/shm") if os.access("/dev/shm", os.W_OK) else None
    # Short, since the path of a Unix socket is; 0700, as mkdtemp makes it and homing wants it.
    directory = tempfile.mkdtemp(prefix="homing-pair-", dir=base)
    try:
        async with AsyncExitStack() as stack:
            stage = await stack.enter_async_context(open_stage(f"{directory}/stage"))
            socket_dir = f"{directory}/run"
            os.mkdir(socket_dir, 0o700)
            server: dict[str, Any] = {"log_level": "info", "access_log": False, **options.server}
            client_tls = None
            if options.tls:
                client_tls = certificate(Path(directory))
                server |= {"ssl_certfile": f"{directory}/cert.pem", "ssl_keyfile": f"{directory}/key.pem"}
            homing: dict[str, Any] | None = {"sessions": [("header", SESSION_HEADER)], **options.sticky}
            routed = WorkerOptions(homing if HOMING == "homing" else None, options.wrap, server)
            plain = replace(routed, sticky=None)
            made = {"front": routed, "owner": routed, "plain": plain}
            if options.shares:
                made["sharing"] = replace(routed, shares=True)
            workers = {
                name: await stack.enter_async_context(_worker(name, worker, stage, socket_dir))
                for name, worker in made.items()
            }
            for worker in workers.values():
                await worker.process.log.until(STARTED)
            front, owner, unrouted = (workers[name] for name in ("front", "owner", "plain"))
            sharing = workers.get("sharing")
            pair = Pair(stage, front, owner, unrouted, sharing, socket_dir, client_tls, options)
            if sharing is not None and HOMING == "homing":
                await pair.share(sharing)
            yield pair
            # All at once, as a supervisor would: a worker that stops may wait for the others.
            for worker in pair.workers:
                worker.process.signal(signal.SIGTERM)
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@asynccontextmanager
async def _worker(name: str, options: WorkerOptions, stage: Stage, socket_dir: str) -> AsyncIterator[Worker]:
    with socket.create_server(("127.0.0.1", 0), backlog=2048) as listener:
        packed = base64.b64encode(pickle.dumps(options)).decode()
        os.set_inheritable(listener.fileno(), True)
        env = {STAGE_ENV: stage.path, NAME_ENV: name, SOCKET_DIR_ENV: socket_dir, "PYTHONWARNINGS": "default"}
        argv = [sys.executable, "-m", "tests.support.pair_worker", str(listener.fileno()), packed]
        async with run_process(argv, env=env, cwd=ROOT, pass_fds=(listener.fileno(),)) as process:
            address = listener.getsockname()[:2]
            # Only the worker holds it now: what connects once the worker is gone is refused.
            listener.close()
            process.address = address
            yield Worker(name, address, process)
            killed = process.returncode in (-signal.SIGKILL, DEATH)  # as the test wanted
            code = await process.stop()
            if not killed and code not in (0, -signal.SIGTERM):
                raise ServerError(f"{name} ended with {code}{process.log}")
        if not killed and process.log.find(LEFT_BEHIND):
            raise ServerError(f"{name} left something behind{process.log}")


def certificate(directory: Path) -> ssl.SSLContext:
    """Make `cert.pem` and `key.pem` for localhost; the context of a client that trusts just that."""
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-keyout", "key.pem", "-out", "cert.pem", "-days", "2", "-subj", "/CN=localhost"]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, cwd=directory, check=True, capture_output=True, timeout=30)
    return ssl.create_default_context(cafile=str(directory / "cert.pem"))

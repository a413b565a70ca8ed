"""The targets: each takes bytes, gives them to the real decoder, and raises if the outcome is none that is allowed.

The first byte chooses how the rest is used: as it is, or signed, so that what lies behind a signature is reached too.

Not here: where the bytes come from (Atheris, hypothesis).
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import os
import socket
import tempfile
from collections.abc import Callable, Iterator
from typing import Any, Final

from itsdangerous import BadData, TimestampSigner, URLSafeSerializer
from starlette.middleware.sessions import SessionMiddleware
from tests.integration.forwarding.sharing import batch, numbered
from tests.support.identity_scopes import SetClock

from homing.directory import SessionOwners
from homing.errors import (
    ForeignRecordError,
    HomingError,
    MalformedRecordError,
    OwnerBusyError,
    OwnerRefusedError,
    OwnerUnreachableError,
    RemoteAppError,
    ReplyCutError,
)
from homing.forwarding.base import HOP_SCOPE_KEY
from homing.forwarding.forwarder import Forwarder, replayable
from homing.forwarding.frames import (
    ASK,
    CALL,
    END,
    GONE,
    JOIN,
    LAST,
    LAST_READ,
    MINE,
    MINE_FIRST,
    NOT_MINE,
    REQUEST,
    SHARE,
    SHARED,
    WHOLE,
    frame,
)
from homing.forwarding.heads import BODY_NONE, BODY_OPEN, BODY_WHOLE, request_head
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver
from homing.forwarding.values import encode_value
from homing.identity import mcp_token_session_id
from homing.identity.cookie import ClockedSigner, SignedCookieReader
from homing.rundir import boot_id, is_worker_id, new_worker_id
from homing.types import SESSION, Message, Reason, Receive, Scope, Send, WorkerId, key_digest

SECRET: Final = "a secret of thirty-two bytes or more"
NAME: Final = "session"
NOW: Final = 1_700_000_000
ANSWER_SECONDS: Final = 5.0

Target = Callable[[bytes], None]


# --- cookies ---


def cookie(data: bytes) -> None:
    """The reader's verdict on a `Cookie` header is the installed `SessionMiddleware`'s."""
    how, rest = data[:1], data[1:]
    clock = SetClock(NOW)
    signer = ClockedSigner(SECRET, clock)
    if how <= b"\x55":
        value = rest
    elif how <= b"\xaa":
        value = NAME.encode() + b"=" + signer.sign(base64.b64encode(rest))
    else:
        # The time of signing, too, is whatever it is.
        stamped, _, stamp = rest.partition(b"\x00")
        text = base64.b64encode(stamped) + b"." + stamp
        value = NAME.encode() + b"=" + text + b"." + signer.get_signature(text)
    headers = [(b"cookie", value)]
    session = _middleware_session(headers, clock)
    expected = (session or {}).get("session_id")
    expected = expected if isinstance(expected, str) and expected else None
    reader = SignedCookieReader(NAME, "session_id", SECRET, clock=clock)
    for _ in range(2):  # the second may be remembered
        found = reader.read(headers)
        assert found == expected, (found, expected)


def _middleware_session(headers: list[tuple[bytes, bytes]], clock: SetClock) -> dict[str, Any] | None:
    """The session that the installed middleware gives the app; None if it fails."""
    found: list[dict[str, Any]] = []

    async def app(scope: Any, receive: Any, send: Any) -> None:
        found.append(dict(scope["session"]))

    async def never(*_: Any) -> Any:
        raise AssertionError("nothing is received or sent")

    middleware = SessionMiddleware(app, SECRET, NAME)
    middleware.signer = ClockedSigner(SECRET, clock)
    running: Any = middleware({"type": "http", "headers": headers}, never, never)
    try:
        running.send(None)  # it waits for nothing, so it needs no event loop
    except StopIteration:
        return found[0]
    except Exception:
        return None
    raise AssertionError("the middleware waits for something")


# --- tokens ---

_TOKENS: Final = URLSafeSerializer(SECRET, salt="mcp")
_OTHERS: Final = URLSafeSerializer(SECRET, salt="another purpose")


def token(data: bytes) -> None:
    """A token names the session that was signed into it, or none; never one of another purpose."""
    how, rest = data[:1], data[1:]
    if how <= b"\x55":
        text = rest.decode("latin-1")
    else:
        # A leading dot says that it is compressed.
        payload = base64.urlsafe_b64encode(rest).rstrip(b"=")
        signed = _TOKENS.make_signer("mcp").sign(payload if how <= b"\xaa" else b"." + payload)
        text = signed.decode()
    found = mcp_token_session_id(text, _TOKENS)
    assert found is None or (isinstance(found, str) and found)
    if found is not None:
        assert _TOKENS.loads(text)["sid"] == found
        with contextlib.suppress(BadData, ValueError, RecursionError):
            _OTHERS.loads(text)
            return  # signed for both, which nobody can do
        assert mcp_token_session_id(text, _OTHERS) is None


# --- frames ---


class Hop:
    """A worker's private socket, and a forwarder with an owner that is a raw socket, on an event loop of their own.

    What an event loop would only log is kept, and is wrong.
    """

    def __init__(self) -> None:
        self._runner = asyncio.Runner()
        self._wrong: list[dict[str, Any]] = []
        self._loop = self._runner.get_loop()
        self._loop.set_exception_handler(lambda _, context: self._wrong.append(context))
        self._stack = contextlib.AsyncExitStack()
        self._runner.run(self._open())

    async def _open(self) -> None:
        directory = self._stack.enter_context(tempfile.TemporaryDirectory(prefix="homing-fuzz-"))
        self.path = f"{directory}/{new_worker_id()}.sock"
        self.receiver: Receiver = await self._stack.enter_async_context(serve_private_socket(_app, self.path))
        self.owner = WorkerId(new_worker_id())
        self.listener = self._stack.enter_context(socket.socket(socket.AF_UNIX))
        self.listener.bind(f"{directory}/{self.owner}.sock")
        self.listener.listen(16)
        self.listener.setblocking(False)
        self.forwarder = await self._stack.enter_async_context(
            Forwarder(directory, owner_timeout_seconds=ANSWER_SECONDS)
        )

    def close(self) -> None:
        self._runner.run(self._stack.aclose())
        self._runner.close()

    def run(self, data: bytes) -> None:
        how, rest = data[:1], data[1:]
        self._runner.run(self._to_owner(rest) if how <= b"\x7f" else self._to_forwarder(rest))
        assert not self._wrong, self._wrong

    async def _to_owner(self, data: bytes) -> None:
        """A peer that sends anything: its connection ends, its requests end, and the next peer is served."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            peer.connect(self.path)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._loop.sock_sendall(peer, data)
                peer.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(ANSWER_SECONDS):
                    while await self._loop.sock_recv(peer, 65536):
                        pass
        async with asyncio.timeout(ANSWER_SECONDS):
            assert await self.receiver.drain(ANSWER_SECONDS), self.receiver
            while self.receiver.connections or self.receiver.shared:
                await asyncio.sleep(0)

    async def _to_forwarder(self, data: bytes) -> None:
        """An owner that answers anything: the request ends as one of the ways that `forward` names, in time."""
        sent: list[Message] = []

        async def answer() -> None:
            accepted, _ = await self._loop.sock_accept(self.listener)
            with accepted:
                accepted.setblocking(False)
                await self._loop.sock_recv(accepted, 65536)
                with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                    await self._loop.sock_sendall(accepted, data)

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        answering = self._loop.create_task(answer())
        try:
            async with asyncio.timeout(ANSWER_SECONDS * 2):
                await self.forwarder.forward(self.owner, Reason.OWNED, (), _scope(), replayable(receive), send)
        except (OwnerUnreachableError, ReplyCutError, RemoteAppError, OwnerRefusedError, OwnerBusyError):
            pass
        finally:
            answering.cancel()
            await asyncio.wait({answering})
        await self.forwarder_is_empty()
        for message in sent:
            assert isinstance(message["type"], str), message

    async def forwarder_is_empty(self) -> None:
        async with asyncio.timeout(ANSWER_SECONDS):
            while any(pool.connections or pool.shared for pool in self.forwarder._pools.values()):
                await asyncio.sleep(0)

    # --- shared connections ---

    def run_shared(self, data: bytes) -> None:
        how, rest = data[:1], data[1:]
        self._runner.run(self._to_sharing_owner(rest) if how <= b"\x7f" else self._to_sharing_forwarder(rest))
        assert not self._wrong, self._wrong

    async def _to_sharing_owner(self, data: bytes) -> None:
        """A peer that sends anything on a shared connection: it ends, its requests end, and nothing of them is left."""
        with socket.socket(socket.AF_UNIX) as peer:
            peer.setblocking(False)
            peer.connect(self.path)
            await self._loop.sock_sendall(peer, frame(SHARE))
            assert await self._loop.sock_recv(peer, 65536) == batch(numbered(SHARED, 0))
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._loop.sock_sendall(peer, data)
                peer.shutdown(socket.SHUT_WR)
                async with asyncio.timeout(ANSWER_SECONDS):
                    while await self._loop.sock_recv(peer, 65536):
                        pass
        async with asyncio.timeout(ANSWER_SECONDS):
            assert await self.receiver.drain(ANSWER_SECONDS), self.receiver
            while self.receiver.connections or self.receiver.shared:
                await asyncio.sleep(0)
        assert not self.receiver.called

    async def _to_sharing_forwarder(self, data: bytes) -> None:
        """An owner that answers anything on a shared connection: its requests end as `forward` names, in time."""
        sent: list[Message] = []

        async def receive() -> Message:
            return {"type": "http.disconnect"}

        async def send(message: Message) -> None:
            sent.append(message)

        async def hang_up() -> None:
            """What goes elsewhere is read, and finds nobody."""
            while True:
                accepted, _ = await self._loop.sock_accept(self.listener)
                with accepted:
                    accepted.setblocking(False)
                    await self._loop.sock_recv(accepted, 65536)

        pool = self.forwarder._pool(self.owner)
        pool._shared_from = 0
        await pool.open_shared()
        shared = pool.shared
        assert shared is not None
        accepted, _ = await self._loop.sock_accept(self.listener)
        with accepted:
            accepted.setblocking(False)
            assert await self._loop.sock_recv(accepted, 65536) == frame(SHARE)
            await self._loop.sock_sendall(accepted, batch(numbered(SHARED, 0)))
            while not shared.takes(self._loop.time()):
                await asyncio.sleep(0)
            requests = [
                self._loop.create_task(
                    self.forwarder.forward(self.owner, Reason.OWNED, (), _scope(), replayable(receive), send)
                )
                for _ in range(2)
            ]
            await self._loop.sock_recv(accepted, 65536)
            hanging_up = self._loop.create_task(hang_up())
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):
                await self._loop.sock_sendall(accepted, data)
        try:
            async with asyncio.timeout(ANSWER_SECONDS * 2):
                for ended in await asyncio.gather(*requests, return_exceptions=True):
                    assert isinstance(
                        ended,
                        bool
                        | OwnerUnreachableError
                        | ReplyCutError
                        | RemoteAppError
                        | OwnerRefusedError
                        | OwnerBusyError,
                    ), ended
        finally:
            hanging_up.cancel()
            await asyncio.wait({hanging_up})
        await self.forwarder_is_empty()
        assert not shared.exchanges
        assert not shared.called
        for message in sent:
            assert isinstance(message["type"], str), message


async def _app(scope: Scope, receive: Receive, send: Send) -> None:
    """Takes every request as its own, reads the body, and answers."""
    scope[HOP_SCOPE_KEY].mine()
    if scope["type"] != "http":
        while (await receive())["type"] not in ("websocket.disconnect", "http.disconnect"):
            pass
        return
    while True:
        message = await receive()
        if message["type"] == "http.disconnect" or not message.get("more_body"):
            break
    await send({"type": "http.response.start", "status": 200, "headers": []})
    await send({"type": "http.response.body", "body": b"", "more_body": False})


def _scope() -> Scope:
    return {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "server": ("127.0.0.1", 8000),
        "client": ("127.0.0.1", 50000),
        "scheme": "http",
        "root_path": "",
        "headers": [(b"host", b"x")],
        "method": "GET",
        "path": "/",
        "raw_path": b"/",
        "query_string": b"",
    }


@contextlib.contextmanager
def frames() -> Iterator[Target]:
    hop = Hop()
    try:
        yield hop.run
    finally:
        hop.close()


@contextlib.contextmanager
def shared_frames() -> Iterator[Target]:
    hop = Hop()
    try:
        yield hop.run_shared
    finally:
        hop.close()


# --- records ---


@contextlib.contextmanager
def records() -> Iterator[Target]:
    """A record names the worker that it names in full, or is refused by an error of its own."""
    with tempfile.TemporaryDirectory(prefix="homing-fuzz-") as directory:
        owners = SessionOwners(directory, new_worker_id(), lambda session_id: True)
        path = os.path.join(directory, "session-owners", key_digest(SESSION, "s"))
        start = boot_id().encode() + b"."

        def record(data: bytes) -> None:
            how, text = data[:1], data[1:4000].replace(b"\x00", b"")
            text = text if how <= b"\x7f" else start + text
            if not text:
                return
            os.symlink(text, path)
            try:
                named = os.fsdecode(text)
                whole = named[: len(start)] == start.decode() and is_worker_id(named[len(start) :])
                try:
                    found = owners.owner("s")
                except (MalformedRecordError, ForeignRecordError):
                    assert not whole
                else:
                    assert whole
                    assert found == named[len(start) :], (found, named)
                with contextlib.suppress(HomingError):
                    assert owners.acquire("s") != owners.worker_id or named.endswith(owners.worker_id)
                assert not owners.mine("s")
            finally:
                os.unlink(path)

        try:
            yield record
        finally:
            asyncio.run(owners.aclose())


@contextlib.contextmanager
def _always(target: Target) -> Iterator[Target]:
    yield target


TARGETS: Final[dict[str, Callable[[], contextlib.AbstractContextManager[Target]]]] = {
    "cookie": lambda: _always(cookie),
    "token": lambda: _always(token),
    "frames": frames,
    "shared_frames": shared_frames,
    "records": records,
}
"""Opens each target by its name."""


def seeds(name: str) -> list[bytes]:
    """Good examples, from which a fuzzer goes on."""
    session = json.dumps({"session_id": "s1"}).encode()
    match name:
        case "cookie":
            signed = TimestampSigner(SECRET).sign(base64.b64encode(session))
            return [
                b"\x00session=" + signed,
                b"\x60" + session,
                b"\xff" + session + b"\x00AAAA",
                b'\x00a="b\\073c"; session=x',
            ]
        case "token":
            return [
                b"\x00" + _TOKENS.dumps({"sid": "s1"}).encode(),
                b"\x60" + json.dumps({"sid": "s1"}).encode(),
                b"\xff" + session,
            ]
        case "frames":
            return [b"\x00" + first for first in _first_frames()] + [
                b"\xff" + frame(WHOLE | MINE_FIRST, b"\x92\xcc\xc8\x90", b"hello"),
                b"\xff" + frame(WHOLE),
                b"\xff" + frame(0x21),
            ]
        case "shared_frames":
            request = request_head(0, ("s",), _scope(), BODY_NONE, ())
            start = b"\x92\xcc\xc8\x90"
            return [
                b"\x00" + batch(numbered(REQUEST, 1, request), numbered(REQUEST, 2, request)),
                b"\x00" + batch(numbered(REQUEST, 1, request)) + batch(numbered(GONE, 1), numbered(GONE, 9)),
                b"\xff" + batch(numbered(WHOLE, 1, start, b"hello"), numbered(WHOLE, 2, start, b"hello")),
                b"\xff" + batch(numbered(MINE, 1), numbered(NOT_MINE, 2)) + batch(numbered(END, 1)),
                b"\xff" + batch(numbered(CALL, 1, encode_value(7, "it")), numbered(LAST_READ, 1)),
                b"\xff" + batch(numbered(CALL, 1)),
            ]
        case _:
            return [b"\x00nonsense", b"\x80" + b"0" * 32, b"\x00" + boot_id().encode() + b"." + b"a" * 32]


def _first_frames() -> list[bytes]:
    return [
        frame(REQUEST, request_head(0, ("s",), _scope(), BODY_NONE, ())),
        frame(REQUEST, request_head(0, ("s",), _scope(), BODY_WHOLE, (2, 3)), b"hello"),
        frame(REQUEST, request_head(0, ("s",), _scope(), BODY_OPEN, ())) + frame(LAST, b"", b"the rest"),
        frame(ASK, encode_value(["session", "s", "a" * 32], "it")),
        frame(SHARE) + frame(REQUEST, request_head(0, ("s",), _scope(), BODY_OPEN, ())),
        frame(JOIN, encode_value(1, "it")),
    ]

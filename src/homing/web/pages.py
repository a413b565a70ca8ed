"""Static pages for a task set, served on loopback by the worker itself.

Only files that were there at the start are served, each under its own path: nothing of a request's path reaches the file
system. Files are read once, in a thread, and kept.

Not here: which pages (a task set's).
"""

from __future__ import annotations

import asyncio
import mimetypes
from pathlib import Path
from typing import Final
from urllib.parse import unquote

from homing.web.loopback import Loopback

_HEAD_BYTES: Final = 16_384
_IDLE_SECONDS: Final = 120.0
_MAX_FILES: Final = 20_000


class StaticPages:
    """A folder's files on `http://127.0.0.1:<free port>`. Owns its listener and connections.

    Args:
        folder: Its files are served, below it too.
    """

    def __init__(self, folder: Path) -> None:
        self.folder: Final = folder
        self.served = 0
        self._files: dict[str, Path] = {}
        self._contents: dict[str, bytes] = {}
        self._listener = Loopback(self._serve, "page connection", _HEAD_BYTES)

    @property
    def origin(self) -> str:
        """`http://127.0.0.1:port`.

        Raises:
            RuntimeError: not started.
        """
        return self._listener.origin

    async def start(self) -> None:
        """Serve. Safe to call twice."""
        if not self._files:
            self._files = await asyncio.to_thread(_files_below, self.folder)
        await self._listener.start()

    async def aclose(self) -> None:
        """End every connection. Safe to call twice."""
        await self._listener.aclose()

    def __repr__(self) -> str:
        return f"<StaticPages {self.folder}: {len(self._files)} files, {self.served} served>"

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            while True:
                async with asyncio.timeout(_IDLE_SECONDS):
                    head = await reader.readuntil(b"\r\n\r\n")
                method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
                writer.write(await self._answer(method, rest.rpartition(" ")[0]))
                await writer.drain()
                # A request with a body is none of ours, and what follows would be read as the next one.
                if method not in ("GET", "HEAD") or b"\nconnection: close" in head.lower():
                    return
        except (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError):
            pass
        finally:
            writer.close()

    async def _answer(self, method: str, target: str) -> bytes:
        if method not in ("GET", "HEAD"):
            return _reply("405 Method Not Allowed", "text/plain", b"", method)
        path = unquote(target.partition("?")[0].partition("#")[0])
        file = self._files.get(path)
        if file is None:
            return _reply("404 Not Found", "text/plain", b"not here\n", method)
        content = self._contents.get(path)
        if content is None:
            content = self._contents[path] = await asyncio.to_thread(file.read_bytes)
        self.served += 1
        kind = mimetypes.guess_type(file.name)[0] or "application/octet-stream"
        if kind.startswith("text/") or kind == "application/javascript":
            kind += "; charset=utf-8"
        return _reply("200 OK", kind, content, method)


def _files_below(folder: Path) -> dict[str, Path]:
    found: dict[str, Path] = {}
    for path in sorted(folder.rglob("*")):
        if path.is_file() and not path.is_symlink():
            found["/" + path.relative_to(folder).as_posix()] = path
            if len(found) > _MAX_FILES:
                raise ValueError(f"{folder} has more than {_MAX_FILES} files")
    return found


def _reply(status: str, kind: str, content: bytes, method: str) -> bytes:
    head = (
        f"HTTP/1.1 {status}\r\ncontent-type: {kind}\r\ncontent-length: {len(content)}\r\n"
        "cache-control: max-age=3600\r\nx-content-type-options: nosniff\r\n\r\n"
    ).encode()
    return head if method == "HEAD" else head + content

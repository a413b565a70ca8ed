"""An MCP server on the official SDK 1.x that keeps one book for each session, in its own memory.

    homing run examples.mcp_v1_server:mcp --workers 3 --preset mcp

`homing run` takes the server object itself and serves its Streamable HTTP app at /mcp. Nothing here
knows of several workers: a session's book is a Python list in the process that answered
`initialize`.
"""

import os
from weakref import WeakKeyDictionary

from mcp.server.fastmcp import Context, FastMCP
from mcp.server.session import ServerSession
from mcp.types import SamplingMessage, TextContent
from pydantic import BaseModel

# The SDK logs an error, with a long traceback, for each GET stream that a DELETE ends.
mcp = FastMCP("book per session", log_level="CRITICAL")
books: WeakKeyDictionary[ServerSession, list[str]] = WeakKeyDictionary()


class Page(BaseModel):
    """What a call did: how many lines the session's book has now, and which process holds it."""

    lines: int
    pid: int


class Answer(BaseModel):
    """What the client answered to a question of the server's."""

    text: str
    pid: int


@mcp.tool()
async def write(line: str, ctx: Context[ServerSession, None]) -> Page:
    """Write one line into this session's book."""
    book = books.setdefault(ctx.session, [])
    book.append(line)
    return Page(lines=len(book), pid=os.getpid())


@mcp.tool()
async def announce(ctx: Context[ServerSession, None]) -> Page:
    """Tell the client, on its GET stream, that the server's resources have changed."""
    await ctx.session.send_resource_list_changed()
    return Page(lines=len(books.get(ctx.session, [])), pid=os.getpid())


@mcp.tool()
async def ask(question: str, ctx: Context[ServerSession, None]) -> Answer:
    """Ask the client's own model (sampling): a request from server to client, inside a call from client to server."""
    reply = await ctx.session.create_message(
        [SamplingMessage(role="user", content=TextContent(type="text", text=question))],
        max_tokens=100,
        related_request_id=ctx.request_id,
    )
    text = reply.content.text if isinstance(reply.content, TextContent) else ""
    return Answer(text=text, pid=os.getpid())


app = mcp.streamable_http_app()

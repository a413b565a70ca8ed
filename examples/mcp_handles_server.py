"""An MCP server for the sessionless protocol (2026-07-28): a tool opens a book, later calls name it by its handle.

    homing run examples.mcp_handles_server:mcp --workers 3 --preset mcp --session mcp-handle:book

There are no sessions in this protocol: each call is a request of its own, perhaps from another
client. What belongs together says so itself, with the argument `book`. The books are in this
process's memory, so a call must reach the worker that has its book; `mcp-handle:book` learns the
handle from the result that first carries it, and finds it in every later call.
"""

import os
import secrets
from typing import Annotated

from mcp.server.mcpserver import Elicit, MCPServer, Resolve
from pydantic import BaseModel, Field

mcp = MCPServer("books by handle")
books: dict[str, list[str]] = {}


class Opened(BaseModel):
    """A new book's handle, and the process that holds it."""

    book: str
    pid: int


class Page(BaseModel):
    """How many lines a book has now, and the process that holds it."""

    lines: int
    pid: int


class Title(BaseModel):
    """The form that the client fills in."""

    text: str


def find(book: str) -> list[str]:
    """The lines of a book of this process."""
    if book not in books:
        raise ValueError(f"process {os.getpid()} has no such book")
    return books[book]


@mcp.tool()
async def open_book(title: str) -> Opened:
    """Open a new book and return its handle."""
    book = secrets.token_hex(8)
    books[book] = [title]
    return Opened(book=book, pid=os.getpid())


@mcp.tool()
async def write(book: str, line: str) -> Page:
    """Write one line into a book."""
    find(book).append(line)
    return Page(lines=len(books[book]), pid=os.getpid())


# Clients that have listed the tools repeat this argument in the header `Mcp-Param-Book`.
@mcp.tool()
async def read(book: Annotated[str, Field(json_schema_extra={"x-mcp-header": "Book"})]) -> Page:
    """Count a book's lines."""
    return Page(lines=len(find(book)), pid=os.getpid())


async def ask_title() -> Elicit[Title]:
    """The question is a reply that asks for more; the client then repeats the whole call with the answer."""
    return Elicit("a better title", Title)


# Both rounds name the book, so they reach one worker: the state that the client carries between
# them is sealed with a key of this process (`RequestStateSecurity` can share one, for tools that
# take no handle).
@mcp.tool()
async def retitle(book: str, title: Annotated[Title, Resolve(ask_title)]) -> Page:
    """Ask for a better title of a book."""
    find(book)[0] = title.text
    return Page(lines=len(books[book]), pid=os.getpid())


app = mcp.streamable_http_app()

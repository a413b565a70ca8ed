"""What the MCP client drivers count, and the one JSON line that they print.

The drivers run as programs of their own, each under the interpreter that has its SDK, so this imports only the standard
library.
"""

import argparse
import json
from collections import Counter
from dataclasses import dataclass, field


@dataclass
class Tally:
    """What happened to all clients of one run of a driver."""

    clients: int = 0
    """Clients whose `initialize` (or, without sessions, first call) succeeded."""
    calls: int = 0
    """Tool calls made."""
    right: int = 0
    """Tool calls answered by the process, and from the state, that their session (or handle) belongs to."""
    noticed: int = 0
    """Notifications that arrived on a GET stream; one is asked for by each client."""
    answered: int = 0
    """Questions from server to client whose answer came back in the call's result; one for each client."""
    after_delete: Counter[str] = field(default_factory=Counter)
    """`METHOD STATUS` of requests with the ID of a session that was deleted."""
    statuses: Counter[str] = field(default_factory=Counter)
    """`METHOD STATUS` of every request that the SDK itself made; its last one in a session is the DELETE."""
    param_headers: int = 0
    """Requests that carried an `Mcp-Param-…` header."""
    pids: Counter[int] = field(default_factory=Counter)
    """Right calls by the process that answered."""
    after_kill: list[str] = field(default_factory=list)
    """`METHOD STATUS` of requests of a session whose worker was killed, until the first 404."""
    seconds_to_gone: float | None = None
    """From the SIGKILL to that 404."""
    error_after_kill: str | None = None
    """What the SDK raised for the next call of that session."""
    errors: Counter[str] = field(default_factory=Counter)
    """What else was raised."""

    def print(self) -> None:
        """The JSON line."""
        print(json.dumps(vars(self)))


def arguments(*more: str) -> argparse.Namespace:
    """A driver's command line; `more` are flags of its own."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--clients", type=int, default=1)
    parser.add_argument("--calls", type=int, default=20)
    parser.add_argument("--new-connections", action="store_true", help="of every other client, for every request")
    parser.add_argument("--only-calls", action="store_true", help="no notification and no question")
    parser.add_argument("--kill", action="store_true", help="kill the worker that owns the session")
    parser.add_argument("--mode", default="legacy", help="the 2.x client's mode")
    for flag in more:
        parser.add_argument(flag, action="store_true")
    return parser.parse_args()

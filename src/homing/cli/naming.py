"""Which running server does a user name? Also by its address as the server's log prints it: `http://[::1]:8000`.

Not here: what else a server is called, and how it is found (`homing.watch`).
"""

from __future__ import annotations

import re
from typing import Final

from homing.watch.servers import Server, find_server

_PRINTED: Final = re.compile(r"(?:https?://)?([^/]+:\d+)/?")


def named_server(name: str) -> Server:
    """The server that a user names.

    Raises:
        ConfigurationError: none, or more than one, is called so; the message lists them.
    """
    printed = _PRINTED.fullmatch(name)
    return find_server(name if printed is None else printed[1])

"""Which running server does a user name? Also by its address as the server's log prints it: `http://[::1]:8000`.

Not here: what else a server is called, and how it is found (`homing.watch`).
"""

from __future__ import annotations

import re
from typing import Final

from homing.watch.servers import Server, find_server

_PRINTED: Final = re.compile(r"(?:https?://)?(?:\[([^]/]+)\]|([^][:/]+)):(\d+)/?")


def named_server(name: str) -> Server:
    """The server that a user names.

    Raises:
        ConfigurationError: none, or more than one, is called so; the message lists them.
    """
    return find_server(_address(name))


def _address(name: str) -> str:
    """The address that is printed so, as a server's description has it; any other name as it is."""
    if (printed := _PRINTED.fullmatch(name)) is None:
        return name
    in_brackets, host, port = printed.groups()
    return f"{in_brackets or host}:{port}"

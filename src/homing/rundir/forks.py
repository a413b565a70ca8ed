"""What must not outlive a fork: descriptors that prove a process alive, and claims that only the parent may make."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from typing import Protocol

_in_child: dict[object, Callable[[], None]] = {}


def _forked() -> None:
    hooks = list(_in_child.values())
    _in_child.clear()
    for hook in hooks:
        hook()


os.register_at_fork(after_in_child=_forked)


def run_in_forked_child(hook: Callable[[], None]) -> Callable[[], None]:
    """Call `hook` in every child that this process forks from now on; returns what undoes this.

    The hook runs before any other code of the child; it must not raise, wait, or take a lock.
    """
    token = object()
    _in_child[token] = hook
    return lambda: _in_child.pop(token, None) and None


class _Detachable(Protocol):
    def detach(self) -> int: ...


def close_after_fork(thing: int | _Detachable) -> Callable[[], None]:
    """Close a descriptor or a socket in every child forked from now on; returns what undoes this.

    Call what it returns before you close a plain descriptor, whose number may then name something else. A socket that
    was closed meanwhile is left alone.
    """

    def close() -> None:
        fd = thing if isinstance(thing, int) else thing.detach()
        if fd >= 0:
            with contextlib.suppress(OSError):
                os.close(fd)

    return run_in_forked_child(close)

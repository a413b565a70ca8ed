"""What a lease of a Chromium provider holds, and its backends play in.

Not here: the providers (`provider.py`, `remote.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from homing.web.base import Footprint
from homing.web.chromium.context import Context


@dataclass(eq=False, slots=True)
class Held:
    """One context, and where it is.

    Attributes:
        is_connected: Whether its browser is still there.
        viewport: Its pages' width and height, CSS pixels.
    """

    is_connected: Callable[[], bool]
    context: Context
    footprint: Footprint
    viewport: tuple[int, int]

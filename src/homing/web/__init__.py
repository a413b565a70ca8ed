"""Browser sessions for web agents: which browser does a session have, and what becomes of it?

Needs the extra: `pip install homing[web]`. Nothing below this room knows that it exists.
"""

from __future__ import annotations

"""Chromium for web sessions: which one, how it is started and ended, what a session sees of it and does in it.

Needs the extra `homing[web]`, and a Chromium of the system (`binary.py` says which).
"""

from __future__ import annotations

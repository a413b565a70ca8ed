"""A resources server in the seeds' way that places its own starts: `uvicorn tests.support.placed_seeds:app --workers 3`."""

from __future__ import annotations

import os

from tests.support.seed_servers import ManualClock, install_resources, resources_app

from homing.placement import PlacementOptions
from homing.rundir import SESSION_SOCKET_DIR_ENV

_clock = ManualClock()
app = resources_app(_clock)
install_resources(
    app,
    lambda: os.environ[SESSION_SOCKET_DIR_ENV],  # once the worker starts, whoever has set it
    _clock,
    placing=PlacementOptions(place="fewest", max_sessions=12),
)

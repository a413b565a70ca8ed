"""A resources server in the seeds' way that places its own starts: `uvicorn tests.support.placed_seeds:app --workers 3`."""

from __future__ import annotations

from tests.support.seed_servers import ManualClock, install_resources, resources_app

from homing.placement import PlacementOptions
from homing.rundir import create_session_socket_dir

_clock = ManualClock()
app = resources_app(_clock)
install_resources(
    app,
    create_session_socket_dir,  # once the worker starts, whoever has said where
    _clock,
    placing=PlacementOptions(place="fewest", max_sessions=12),
)

"""Where does a new session begin, and may it begin now?

Each worker says in a row of one shared board how many sessions it has (`board.py`); where a start runs is a plain function of
the rows (`choice.py`). A server's limit of sessions is kept by permits that the kernel takes back from the dead
(`permits.py`), and who waits for one waits in turn (`queue.py`). `placement.py` joins them for one worker.

The invariant: this only chooses where a start's handler runs, and when. Who owns the session, acquire alone decides.

Not here: which requests are starts (`homing.identity`), and how they reach the worker that was chosen (`homing.routing`).
"""

from homing.placement.choice import POLICIES, Place
from homing.placement.placement import Placement, PlacementOptions
from homing.placement.queue import Start

__all__ = ["POLICIES", "Place", "Placement", "PlacementOptions", "Start"]

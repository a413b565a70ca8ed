"""What does a server say about itself?

Each worker writes its figures into its own row of one shared page (`page.py`, `figures.py`); whoever may read the run directory
reads them all without asking a worker (`servers.py`). Metrics are made from the same rows (`metrics.py`).
"""

from homing.watch.figures import Figures, figures_of
from homing.watch.page import Row, open_row, read_rows
from homing.watch.servers import Description, Server, describe, find_server, running_servers

__all__ = [
    "Description",
    "Figures",
    "Row",
    "Server",
    "describe",
    "figures_of",
    "find_server",
    "open_row",
    "read_rows",
    "running_servers",
]

"""How does a request reach its owner?"""

from homing.forwarding.base import HOP_SCOPE_KEY, Answer, Hop
from homing.forwarding.forwarder import Forwarder
from homing.forwarding.heads import crossable_extensions
from homing.forwarding.private_socket import serve_private_socket
from homing.forwarding.receiver import Receiver
from homing.forwarding.replay import Replayable, replayable

__all__ = [
    "HOP_SCOPE_KEY",
    "Answer",
    "Forwarder",
    "Hop",
    "Receiver",
    "Replayable",
    "crossable_extensions",
    "replayable",
    "serve_private_socket",
]

"""One worker of a `pair`, or its plain twin, as a process: `python -m tests.support.pair_worker FD OPTIONS`.

FD is a listening socket that the test made; OPTIONS is a pickled, base64-encoded `tests.support.pair.WorkerOptions`.
"""

from __future__ import annotations

import base64
import pickle
import socket
import sys

import uvicorn
from tests.support.pair import WorkerOptions

from homing.forwarding.forwarder import Forwarder
from homing.runtime.config import RunConfig
from homing.runtime.worker import HomingServer


def main(fd: int, options: WorkerOptions) -> None:
    listener = socket.socket(fileno=fd)
    if options.sticky is None:
        uvicorn.Server(uvicorn.Config(options.build(), **options.server)).run(sockets=[listener])
        return
    if options.shares:
        assert Forwarder.__init__.__kwdefaults__ is not None
        Forwarder.__init__.__kwdefaults__["shared_from"] = 0
    config = RunConfig(options.build(), routing=None, **options.server)
    config.handoff = True
    HomingServer(config, lambda _: None).run(sockets=[listener])


if __name__ == "__main__":
    main(int(sys.argv[1]), pickle.loads(base64.b64decode(sys.argv[2])))

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


def main(fd: int, options: WorkerOptions) -> None:
    config = uvicorn.Config(options.build(), **options.server)
    uvicorn.Server(config).run(sockets=[socket.socket(fileno=fd)])


if __name__ == "__main__":
    main(int(sys.argv[1]), pickle.loads(base64.b64decode(sys.argv[2])))

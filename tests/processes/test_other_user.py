"""Another user of the machine, who knows every path, reaches no private socket and no owner record of a running server."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys

import pytest
from tests.support.recorder import read_body, respond
from tests.support.staged import SESSION, call, open_staged

NOBODY = 65_534

# Run as root's child, it becomes the other user first. What it may not do is what it prints.
TRY = """
import json, os, socket, sys
paths = json.loads(sys.argv[1])
import encodings.idna
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
refused = []
for path in paths:
    for what, do in {
        "list": lambda: os.listdir(path),
        "look": lambda: os.lstat(path + "/x" if os.path.isdir(path) else path),
        "link": lambda: os.symlink("x", path + "/planted"),
        "lock": lambda: os.open(path, os.O_RDONLY),
        "connect": lambda: socket.socket(socket.AF_UNIX).connect(path),
    }.items():
        try:
            do()
        except PermissionError:
            refused.append([path, what])
        except OSError as error:
            refused.append([path, what + ": " + str(error)])
        else:
            raise SystemExit(f"another user could {what} {path}")
print(json.dumps(refused))
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
def test_another_user_of_the_machine_reaches_no_socket_and_no_record() -> None:
    async def test() -> None:
        async with open_staged(*SESSION, workers=2) as server, server.wires() as wires:
            owner, front = wires
            session = await server.start_session(wires[owner])
            case = server.script(read_body(), *respond())
            directory = server.run_directory
            paths = [directory, *directory.iterdir(), *(directory / "session-owners").iterdir()]
            sockets = [path for path in paths if path.suffix == ".sock"]
            assert len(sockets) == 3  # the workers' and the server's
            tried = [str(path) for path in paths if not path.is_symlink()]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-c", TRY, json.dumps(tried)), stdout=subprocess.PIPE, stderr=subprocess.PIPE
            )
            told, errors = await process.communicate()
            assert process.returncode == 0, errors.decode()
            refused = json.loads(told)
            # Everything was denied, and nothing was found to be something else first.
            assert sorted(refused) == sorted(
                [path, what] for path in tried for what in ("list", "look", "link", "lock", "connect")
            )
            assert (await call(wires[front], session, case)).status == 200

    asyncio.run(test())

"""Gradio's own client, many at once, against `examples/gradio_ledger.py`; prints what it saw as one line of JSON.

    python -m tests.support.gradio_driver URL --clients N --calls N [--kill]

Written for the environment that has gradio_client (`make setup-ecosystem`).
"""

import argparse
import json
import os
import signal
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from gradio_client import Client, handle_file


def session(url: str, calls: int, number: int) -> dict[str, Any]:
    """One page's life: totals, an upload and its download, steps of a slow count. Counts what came out right."""
    client = Client(url, verbose=False)
    right, pids = 0, set()
    try:
        for call in range(1, calls + 1):
            answer = client.predict(number, api_name="/add")
            right += answer["total"] == number * call
            pids.add(answer["pid"])
            with tempfile.TemporaryDirectory() as folder:
                quiet = Path(folder, f"quiet-{call}.txt")
                quiet.write_text(f"file {call} of {number}")
                loud, sent = client.predict(handle_file(str(quiet)), api_name="/shout")
            right += Path(loud).read_text() == f"FILE {call} OF {number}"
            right += sent["files"] == [f"quiet-{earlier}.txt" for earlier in range(1, call + 1)]
            pids.add(sent["pid"])
        steps = client.submit(5, api_name="/count")
        right += [step["total"] for step in steps] == [number * calls + step for step in range(1, 6)]
    finally:
        client.close()
    return {"right": right, "checks": 3 * calls + 1, "pids": sorted(pids)}


def lose(url: str) -> dict[str, Any]:
    """A session whose worker is killed, and a new one after it."""
    client = Client(url, verbose=False)
    pid = client.predict(1, api_name="/add")["pid"]
    os.kill(pid, signal.SIGKILL)
    error = ""
    try:
        client.predict(1, api_name="/add")
    except Exception as raised:
        error = str(raised)
    client.reset_session()
    after = client.predict(1, api_name="/add")
    client.close()
    return {"error": error, "total_after": after["total"], "moved": after["pid"] != pid}


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("url")
    arguments.add_argument("--clients", type=int, default=8)
    arguments.add_argument("--calls", type=int, default=3)
    arguments.add_argument("--kill", action="store_true")
    given = arguments.parse_args()
    if given.kill:
        tally: Any = lose(given.url)
    else:
        with ThreadPoolExecutor(given.clients) as pool:
            tally = list(pool.map(lambda number: session(given.url, given.calls, number + 1), range(given.clients)))
    json.dump(tally, sys.stdout)
    print()
    sys.stdout.flush()
    os._exit(0)  # the client's heartbeat threads may still wait for their streams


if __name__ == "__main__":
    main()

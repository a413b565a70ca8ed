"""BrowserGym's side, run by its own Python: reads commands from stdin, answers each with a line of JSON.

step N, reset N → {"cpu": seconds, "seconds": wall} of one    memory → {"pss": bytes}
"""

from __future__ import annotations

import json
import os
import sys
import time


def tree_cpu() -> float:
    """As in `measure.py`, which this Python cannot import."""
    stats = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    fields = file.read().rpartition(")")[2].split()
            except OSError:
                continue
            stats[int(name)] = (int(fields[1]), sum(int(each) for each in fields[11:15]))
    wanted = {os.getpid()}
    while more := {pid for pid, (parent, _) in stats.items() if parent in wanted} - wanted:
        wanted |= more
    return sum(stats[pid][1] for pid in wanted if pid in stats) / os.sysconf("SC_CLK_TCK")


def tree_pss() -> int:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            try:
                with open(f"/proc/{name}/stat") as file:
                    parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
            except OSError:
                continue
    wanted = {os.getpid()}
    while more := {pid for pid, parent in parents.items() if parent in wanted} - wanted:
        wanted |= more
    total = 0
    for pid in wanted:
        try:
            with open(f"/proc/{pid}/cmdline") as file:
                if "chrom" not in file.read():
                    continue
            with open(f"/proc/{pid}/smaps_rollup") as file:
                total += next(int(line.split()[1]) for line in file if line.startswith("Pss:")) * 1024
        except (OSError, StopIteration):
            continue
    return total


def main() -> None:
    import browsergym.core
    import browsergym.core.chat
    import browsergym.miniwob
    import gymnasium

    binary = os.environ["CHROMIUM"]
    # The chat's browser is launched without our arguments.
    playwright = browsergym.core._get_global_playwright()
    launch = playwright.chromium.launch

    def patched(*arguments: object, **more: object) -> object:
        more["executable_path"] = binary
        more["args"] = [*(more.get("args") or []), "--no-sandbox", "--disable-gpu"]
        return launch(*arguments, **more)

    playwright.chromium.launch = patched
    env = gymnasium.make(
        "browsergym/miniwob.click-checkboxes",
        headless=True,
        slow_mo=0,
        pre_observation_delay=0,
        disable_env_checker=True,
    )
    env.reset(seed=0)
    unwrapped = env.unwrapped
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        command, _, count = line.strip().partition(" ")
        before, began = tree_cpu(), time.monotonic()
        if command == "step":
            env.reset(seed=0)
            before, began = tree_cpu(), time.monotonic()
            for _ in range(int(count)):
                bid = unwrapped.page.locator("#area input[type=checkbox]").first.get_attribute("bid")
                observation, *_ = env.step(f"click({bid!r})")
                assert not observation["last_action_error"], observation["last_action_error"]
        elif command == "reset":
            for number in range(int(count)):
                env.reset(seed=number)
        elif command == "memory":
            print(json.dumps({"pss": tree_pss()}), flush=True)
            continue
        else:
            break
        told = {"cpu": (tree_cpu() - before) / int(count), "seconds": (time.monotonic() - began) / int(count)}
        print(json.dumps(told), flush=True)
    env.close()


if __name__ == "__main__":
    main()

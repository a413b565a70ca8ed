"""`python -m tests.soak_web`: a long fault run, in slices with a server each, and the reports of all of them."""

from __future__ import annotations

import argparse
import json
import random
import sys
from pathlib import Path

from tests.soak_web.run import CHROMIUM, FAKES, fault_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak_web", description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--sessions", type=int, default=500, help="at least so many, in all")
    parser.add_argument("--slices", type=int, default=1, help="servers, one after another, that share the faults")
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6), help="the first slice's")
    parser.add_argument("--players", type=int, default=8)
    parser.add_argument("--slack", type=float, default=0.25, help="how much later than its limit a call may be back")
    parser.add_argument("--out", type=Path, help="a folder for each slice's report, as JSON")
    parser.add_argument("--chromium", action="store_true", help="real browsers in place of fakes")
    options = parser.parse_args()
    bad = 0
    for seed in range(options.seed, options.seed + options.slices):
        report = fault_run(
            subject=CHROMIUM if options.chromium else FAKES,
            seed=seed,
            faults=-(-options.faults // options.slices),
            sessions=-(-options.sessions // options.slices),
            players=options.players,
            slack_seconds=options.slack,
        )
        print("\n".join(report.lines()), flush=True)
        if options.out is not None:
            options.out.mkdir(parents=True, exist_ok=True)
            name = f"{'chromium' if options.chromium else 'fakes'}-{seed}.json"
            (options.out / name).write_text(json.dumps(report.json(), indent=1) + "\n")
        bad += bool(report.violations or report.left)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())

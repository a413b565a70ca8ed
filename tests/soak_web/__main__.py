"""`python -m tests.soak_web`: a long fault run, and its report."""

from __future__ import annotations

import argparse
import random
import sys
from pathlib import Path

from tests.soak_web.run import CHROMIUM, FAKES, fault_run


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak_web", description=__doc__)
    parser.add_argument("--faults", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(10**6))
    parser.add_argument("--players", type=int, default=8)
    parser.add_argument("--slack", type=float, default=0.25, help="how much later than its limit a call may be back")
    parser.add_argument("--report", type=Path, help="also write the report there")
    parser.add_argument("--chromium", action="store_true", help="real browsers in place of fakes")
    options = parser.parse_args()
    report = fault_run(
        subject=CHROMIUM if options.chromium else FAKES,
        seed=options.seed,
        faults=options.faults,
        players=options.players,
        slack_seconds=options.slack,
    )
    text = "\n".join(report.lines())
    print(text)
    if options.report is not None:
        options.report.write_text(text + "\n")
    return 1 if report.violations or report.left else 0


if __name__ == "__main__":
    sys.exit(main())

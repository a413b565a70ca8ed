"""`python -m tests.soak --seconds 30 --seed 7 [--json]`: one soak; exit code 1 if a promise was broken."""

from __future__ import annotations

import argparse
import asyncio
import secrets
import sys

from tests.soak.run import soak


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=__doc__)
    parser.add_argument("--seconds", type=float, default=30.0, help="how long load and faults last")
    parser.add_argument("--seed", type=int, default=None, help="what the clients do, and which faults come when")
    parser.add_argument("--json", action="store_true", help="the report as JSON")
    options = parser.parse_args()
    seed = secrets.randbits(32) if options.seed is None else options.seed
    print(f"soak: seed {seed}", file=sys.stderr, flush=True)
    report = asyncio.run(soak(options.seconds, seed))
    print(report.to_json() if options.json else report)
    print("\n".join(report.log), file=sys.stderr)
    return 1 if report.broken else 0


if __name__ == "__main__":
    sys.exit(main())

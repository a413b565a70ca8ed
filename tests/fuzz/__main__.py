"""`python -m tests.fuzz --seconds 60 [--target NAME]`: Atheris on each target in turn, a process for each.

Needs an environment of its own (`scripts/setup.sh fuzz`). Ends with exit code 1 and the input, in a file, if a target raised.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from pathlib import Path

FOUND_ENV = "HOMING_FUZZ_FOUND"
NAMES = ("cookie", "token", "frames", "shared_frames", "records")


def fuzz(name: str, seconds: int) -> None:
    import atheris  # type: ignore[import-untyped]  # it has no types, and is in an environment of its own

    with atheris.instrument_imports(include=["homing", "itsdangerous"]):
        from tests.fuzz.targets import TARGETS, seeds
    with tempfile.TemporaryDirectory(prefix="homing-corpus-") as corpus, TARGETS[name]() as target:
        for number, seed in enumerate(seeds(name)):
            (Path(corpus) / f"seed-{number}").write_bytes(seed)
        found = Path(os.environ.get(FOUND_ENV, ".")) / f"homing-fuzz-{name}-"
        limits = [
            f"-max_total_time={seconds}",
            "-max_len=4096",
            "-timeout=20",
            "-rss_limit_mb=1500",
            "-print_final_stats=1",
        ]
        atheris.Setup([sys.argv[0], corpus, f"-artifact_prefix={found}", *limits], target)
        atheris.Fuzz()


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz", description=__doc__)
    parser.add_argument("--seconds", type=int, default=60, help="for all targets together")
    parser.add_argument("--target", choices=NAMES, default=None, help="this one only, in this process")
    options = parser.parse_args()
    if options.target is not None:
        fuzz(options.target, options.seconds)
        return 0
    each = max(1, options.seconds // len(NAMES))
    base = "/dev/shm" if os.path.isdir("/dev/shm") else None
    environment = os.environ | {FOUND_ENV: tempfile.gettempdir()}
    codes = {}
    for name in NAMES:
        print(f"fuzz: {name}, {each} s", file=sys.stderr, flush=True)
        again = [sys.executable, "-m", "tests.fuzz", "--target", name, "--seconds", str(each)]
        # The fuzzer ends its process by itself and closes nothing, so what it leaves lies in a place of its own.
        with tempfile.TemporaryDirectory(prefix="homing-fuzz-", dir=base) as directory:
            codes[name] = subprocess.run(again, check=False, env=environment | {"TMPDIR": directory}).returncode
    print({name: "nothing found" if code == 0 else f"exit code {code}" for name, code in codes.items()})
    return 1 if any(codes.values()) else 0


if __name__ == "__main__":
    sys.exit(main())

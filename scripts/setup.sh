#!/bin/sh
# Makes .venv with homing and everything its tests and checks need. Safe to run again.
set -eu
cd "$(dirname "$0")/.."
python=
for candidate in python3.13 python3.12 python3.11 python3; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
if [ -z "$python" ]; then
    echo "homing needs Python 3.11 or newer: install it (Debian: apt-get install python3 python3-venv), then run this again" >&2
    exit 1
fi
if ! "$python" -c 'import venv, ensurepip' >/dev/null 2>&1; then
    echo "homing needs the venv module of $python: install it (Debian: apt-get install python3-venv), then run this again" >&2
    exit 1
fi
[ -x .venv/bin/python ] || "$python" -m venv .venv
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt -e .
touch .venv/.ready

#!/bin/sh
# Makes .venv with homing and everything its tests and checks need, or, given `mcp1`, .venv-mcp1 with the MCP SDK 1.x, which
# cannot live beside 2.x. Safe to run again.
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
if [ "${1-}" = mcp1 ]; then
    env=.venv-mcp1
    requirements=requirements-mcp1.txt
    constraints=$env/constraints.txt
else
    env=.venv
    requirements=requirements-dev.txt
    constraints=constraints.txt
fi
[ -x "$env/bin/python" ] || "$python" -m venv "$env"
[ "$constraints" = constraints.txt ] || grep -v '^mcp' constraints.txt >"$constraints"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check -c "$constraints" -r "$requirements" -e .
touch "$env/.ready"

#!/bin/sh
# Makes .venv with homing and everything its tests and checks need. Safe to run again, and instant if nothing changed.
set -eu
cd "$(dirname "$0")/.."

ready=.venv/.ready
fail() {
    echo "homing: $*" >&2
    exit 1
}

is_current() {
    [ -f "$ready" ] && .venv/bin/python -c '' 2>/dev/null || return 1
    # An environment that was moved keeps its old path in its scripts.
    [ "$(cat "$ready")" = "$PWD" ] || return 1
    for source in pyproject.toml requirements-dev.txt constraints.txt scripts/setup.sh; do
        [ "$ready" -nt "$source" ] || return 1
    done
}
if is_current; then exit 0; fi

python=
for candidate in python3.13 python3.12 python3.11 python3 python; do
    # A version manager's shim may exist and not run, so try it.
    if "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] || fail "Python 3.11 or newer is needed: install it (Debian: apt-get install python3 python3-venv), then run this again"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "the venv module of $python is needed: install it (Debian: apt-get install python3-venv), then run this again"

rm -f "$ready"
# What an interrupted run left may have a Python and no pip.
if ! .venv/bin/python -m pip --version >/dev/null 2>&1 || ! .venv/bin/pip --version >/dev/null 2>&1; then
    rm -rf .venv
    echo "making .venv with $python (about two minutes) ..."
    "$python" -m venv .venv || fail "$python -m venv failed: install the venv module (Debian: apt-get install python3-venv)"
fi
.venv/bin/python -m pip install --quiet --disable-pip-version-check -c constraints.txt -r requirements-dev.txt -e . ||
    fail "pip could not install what requirements-dev.txt lists (its own message is above); run this again once it can"
printf '%s\n' "$PWD" >"$ready"

#!/bin/sh
# Makes .venv with homing in it: `setup.sh` with everything that its tests and checks need, `setup.sh demo` with what
# homing itself needs, which is much less. Safe to run again, and instant if nothing changed.
set -eu
cd "$(dirname "$0")/.."

whole=.venv/.ready
if [ "${1:-}" = demo ]; then ready=.venv/.ready-demo; else ready=$whole; fi
fail() {
    echo "homing: $*" >&2
    exit 1
}

is_current() {
    [ -f "$1" ] && .venv/bin/python -c '' 2>/dev/null || return 1
    # An environment that was moved keeps its old path in its scripts.
    [ "$(cat "$1")" = "$PWD" ] || return 1
    for source in pyproject.toml requirements-dev.txt constraints.txt scripts/setup.sh; do
        [ "$1" -nt "$source" ] || return 1
    done
}
if is_current "$ready" || is_current "$whole"; then exit 0; fi

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
    echo "making .venv with $python (a minute or two) ..."
    "$python" -m venv .venv || fail "$python -m venv failed: install the venv module (Debian: apt-get install python3-venv)"
fi
set -- -c constraints.txt -e .
[ "$ready" != "$whole" ] || set -- -r requirements-dev.txt "$@"
.venv/bin/python -m pip install --quiet --disable-pip-version-check "$@" ||
    fail "pip could not install what homing needs (its own message is above); run this again once it can"
printf '%s\n' "$PWD" >"$ready"

#!/bin/sh
# Makes an environment with homing in it. Safe to run again, and instant if nothing changed.
#   setup.sh        .venv with everything that the tests and checks need
#   setup.sh demo   .venv with what homing itself needs, which is much less
#   setup.sh demo-rl   the same, and what the RL servers need
#   setup.sh demo-web  the same, and what the web server needs
#   setup.sh web    a Chromium of the system, if there is none and this is Debian and root; else says what is missing
#   setup.sh mcp1   .venv-mcp1 with the MCP SDK 1.x, which cannot live beside 2.x
#   setup.sh fuzz   .venv-fuzz with Atheris, whose wheel is large and is there for few versions of Python
#   setup.sh ecosystem  .venv-ecosystem with Gradio and NiceGUI, which bring a great deal
#   setup.sh browsergym  .venv-browsergym with BrowserGym, the peer of benchmarks/web, which brings a Playwright of its own
#   setup.sh docs   .venv-docs with what makes the site of the docs
set -eu
cd "$(dirname "$0")/.."

env=.venv
requirements=requirements-dev.txt
ready=$env/.ready
homing=.
case "${1:-}" in
    demo)
        requirements=
        ready=$env/.ready-demo
        ;;
    demo-rl)
        requirements=
        ready=$env/.ready-demo-rl
        homing='.[rl]'
        ;;
    demo-web)
        requirements=
        ready=$env/.ready-demo-web
        homing='.[web]'
        ;;
    web)
        for name in chromium-headless-shell chrome-headless-shell chromium chromium-browser google-chrome; do
            if command -v "$name" >/dev/null 2>&1; then exit 0; fi
        done
        # Asked again at each run only where it may help: a package that cannot be had now may be tomorrow.
        if [ "$(id -u)" = 0 ] && [ -f /etc/debian_version ] && command -v apt-get >/dev/null 2>&1; then
            echo "installing chromium-headless-shell, for the tests in real browsers ..."
            export DEBIAN_FRONTEND=noninteractive
            apt-get update -qq >/dev/null 2>&1 || true
            if apt-get install -y -qq --no-install-recommends chromium-headless-shell >/dev/null 2>&1; then exit 0; fi
        fi
        echo "homing: no Chromium: the tests in real browsers are skipped (Debian: apt-get install chromium-headless-shell)"
        exit 0
        ;;
    mcp1 | ecosystem | docs | fuzz | browsergym)
        env=.venv-$1
        requirements=requirements-$1.txt
        ready=$env/.ready
        ;;
esac

fail() {
    echo "homing: $*" >&2
    exit 1
}

is_current() {
    [ -f "$1" ] && "$env/bin/python" -c '' 2>/dev/null || return 1
    # An environment that was moved keeps its old path in its scripts.
    [ "$(cat "$1")" = "$PWD" ] || return 1
    for source in pyproject.toml $requirements constraints.txt scripts/setup.sh; do
        [ "$1" -nt "$source" ] || return 1
    done
}
# Who has everything has what the demo needs.
if is_current "$ready" || is_current "$env/.ready"; then exit 0; fi

python=
for candidate in python3.13 python3.12 python3.11 python3 python; do
    if command -v "$candidate" >/dev/null 2>&1 &&
        "$candidate" -c 'import sys; sys.exit(sys.version_info < (3, 11))' >/dev/null 2>&1; then
        python=$candidate
        break
    fi
done
[ -n "$python" ] ||
    fail "Python 3.11 or newer is needed and was not found: install it (Debian: apt-get install python3 python3-venv)"
"$python" -c 'import venv, ensurepip' >/dev/null 2>&1 ||
    fail "$python has no venv module: install it (Debian: apt-get install python3-venv)"

rm -f "$ready"
# What an interrupted run left may have a Python and no pip.
if ! "$env/bin/python" -m pip --version >/dev/null 2>&1 || ! "$env/bin/pip" --version >/dev/null 2>&1; then
    rm -rf "$env"
    echo "making $env with $python (a minute or two) ..."
    "$python" -m venv "$env" || fail "$python -m venv failed: install the venv module (Debian: apt-get install python3-venv)"
fi
constraints=constraints.txt
if [ "$env" = .venv-mcp1 ]; then
    constraints=$env/constraints.txt
    grep -v '^mcp' constraints.txt >"$constraints"
fi
set -- -c "$constraints" -e "$homing"
# The peer needs older versions than ours, and nothing of homing.
[ "$env" != .venv-browsergym ] || set --
[ -z "$requirements" ] || set -- -r "$requirements" "$@"
"$env/bin/python" -m pip install --quiet --disable-pip-version-check "$@" ||
    fail "pip could not install what homing needs (its own message is above); run this again once it can"
printf '%s\n' "$PWD" >"$ready"

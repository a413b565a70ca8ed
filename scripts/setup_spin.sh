#!/bin/sh
# Installs spin, which searches the models, where it is missing and this may install packages. Instant if it is there.
set -eu
command -v spin >/dev/null 2>&1 && command -v gcc >/dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get >/dev/null 2>&1; then
    apt-get install --yes --quiet spin gcc libc6-dev
else
    echo "homing: the models need spin and gcc (Debian: apt-get install spin gcc)" >&2
    exit 1
fi

#!/usr/bin/env bash
# Chromium for the tests of the HTML report. Installs Debian's when it is missing and we may; else says what to do.
set -euo pipefail

if command -v chromium >/dev/null; then
    exit 0
fi
if [ "$(id -u)" != 0 ] || ! command -v apt-get >/dev/null; then
    echo "ci/chromium.sh: no chromium here; install it for the tests of the HTML report" >&2
    exit 0
fi
export DEBIAN_FRONTEND=noninteractive
apt-get update -qq
apt-get install -qq -y --no-install-recommends chromium >/dev/null
chromium --version

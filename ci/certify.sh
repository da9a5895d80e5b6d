#!/usr/bin/env bash
# Random cases per operator on the CPU backend, resumable: a run that was stopped goes on where it was.
#
# Usage: ci/certify.sh [ARGUMENT of `m3-hw parity` ...]
# CASES  per operator, 2000
set -euo pipefail
cd "$(dirname "$0")/.."

mkdir -p build
.venv/bin/m3-hw parity --backend "${BACKEND:-cpu}" --tier certify --cases "${CASES:-2000}" --state build/certify.state \
    --html build/certify.html --json build/certify.json "$@"
echo "Report: $PWD/build/certify.html"

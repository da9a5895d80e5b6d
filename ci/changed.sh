#!/usr/bin/env bash
# Whether a change can affect a backend: prints true or false.
#
# Usage: ci/changed.sh BACKEND BASE-COMMIT
set -euo pipefail
cd "$(dirname "$0")/.."

backend=$1
base=$2
paths=(m3_hw "backends/$backend" backends/__init__.py tests ci .ci .github Makefile pyproject.toml)

# A base that isn't here (a new branch, a forced push) says nothing about what changed: run.
if ! git cat-file -e "$base^{commit}" 2>/dev/null || ! git diff --quiet "$base" HEAD -- "${paths[@]}"; then
    echo true
else
    echo false
fi

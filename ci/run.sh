#!/usr/bin/env bash
# Everything that CI checks, stage by stage; says at the end how long each took.
set -euo pipefail
cd "$(dirname "$0")/.."

durations=()
report() {
    status=$?
    printf '\n'
    [ ${#durations[@]} -eq 0 ] || printf '%s\n' "${durations[@]}"
    [ "$status" = 0 ] || echo "ci/run.sh: failed in the stage $name (exit status $status)"
}
trap report EXIT

stage() { # NAME COMMAND ...
    name=$1
    shift
    printf '\n== %s\n' "$name"
    local start=$SECONDS
    "$@"
    durations+=("$(printf '%-10s %5d s' "$name" $((SECONDS - start)))")
}

stage environment bash ci/env.sh
stage chromium bash ci/chromium.sh
stage lint bash ci/test.sh lint
stage types bash ci/test.sh types
stage packaging bash ci/packaging.sh
stage tests bash ci/test.sh pytest
stage parity bash ci/parity.sh

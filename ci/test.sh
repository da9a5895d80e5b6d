#!/usr/bin/env bash
# Lint, types and tests, in the environment that ci/env.sh made.
#
# Usage: ci/test.sh [lint] [types] [pytest [ARGUMENT ...]]    all three without an argument
# JOBS   pytest processes, 2. Each takes one thread and about 1 GiB.
set -euo pipefail
cd "$(dirname "$0")/.."

lint() {
    .venv/bin/ruff format --check .
    .venv/bin/ruff check .
}

types() {
    .venv/bin/mypy
}

tests() {
    # One thread a process: the tests are many small calls, which more threads only slow down.
    OMP_NUM_THREADS=1 .venv/bin/python -m pytest -n "${JOBS:-2}" "$@"
}

[ $# -gt 0 ] || set -- lint types pytest
while [ $# -gt 0 ]; do
    stage=$1
    shift
    case $stage in
        lint) lint ;;
        types) types ;;
        pytest)
            tests "$@"
            exit
            ;;
        *)
            echo "ci/test.sh: no stage $stage; accepted: lint, types, pytest" >&2
            exit 2
            ;;
    esac
done

#!/usr/bin/env bash
# Builds the sdist, the wheel from the sdist, and proves the wheel in a clean environment, away from the checkout.
# TORCH, PYTHON: as for ci/env.sh.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${TORCH:-torch==2.13.0}
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT

.venv/bin/python -m build --outdir "$work/dist" . >"$work/build.log" 2>&1 || {
    cat "$work/build.log" >&2
    exit 1
}
wheels=("$work"/dist/*.whl)
.venv/bin/python ci/wheel_files.py "${wheels[0]}"

if [ "$torch" = system ]; then
    "${PYTHON:-python3}" -m venv --system-site-packages "$work/venv"
else
    "${PYTHON:-python3}" -m venv "$work/venv"
    read -ra requirement <<<"$torch"
    "$work/venv/bin/python" -m pip install --quiet "${requirement[@]}" # first: the wheel alone would take any torch
fi
"$work/venv/bin/python" -m pip install --quiet "${wheels[0]}"
cp ci/use_wheel.py "$work"
cd "$work" && "$work/venv/bin/python" use_wheel.py

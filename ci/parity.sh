#!/usr/bin/env bash
# Runs the parity harness on the hardware that this machine has, then simulated on what it lacks, as far as it is written.
#
# Usage: ci/parity.sh [ARGUMENT of `m3-hw parity` ...]
# Leaves build/parity.html (and .json, .xml), and build/parity-NAME-simulated.html for each simulated backend.
set -euo pipefail
cd "$(dirname "$0")/.."

export PATH="$PWD/.venv/bin:$PATH"
mkdir -p build

# What the machine has, not what torch says: a GPU that torch can't see must show up in the report as unavailable.
hardware=(cpu)
if command -v nvidia-smi >/dev/null && nvidia-smi --list-gpus >/dev/null 2>&1; then hardware+=(cuda); fi
if command -v npu-smi >/dev/null && npu-smi info >/dev/null 2>&1; then hardware+=(ascend); fi

# A backend that is written but doesn't find its hardware's software is a failure here, never a silent skip.
python ci/expect_backends.py "${hardware[@]}"

status=0
parity() { # NAME-OF-REPORT ARGUMENT ...
    local report=build/$1
    shift
    rm -f "$report".{html,json,xml} # so that an old report never passes for this run's
    m3-hw parity --html "$report.html" --json "$report.json" --junit "$report.xml" "$@" || status=$?
    [ ! -f "$report.html" ] || echo "Report: $PWD/$report.html"
}

# With no --backend the report also shows the backends that can't run here, and why.
parity parity "$@"

simulated=$(M3_HW_SIMULATE=1 python -c '
import m3_hw
print(*sorted({c.backend for c in m3_hw.capabilities() if c.status == "simulated"}))
')
for backend in $simulated; do
    case " ${hardware[*]} " in *" $backend "*) continue ;; esac
    M3_HW_SIMULATE=1 parity "parity-$backend-simulated" --backend "$backend" "$@"
done
exit "$status"

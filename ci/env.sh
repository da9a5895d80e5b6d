#!/usr/bin/env bash
# Makes .venv with torch and the package, editable, with its test and dev extras. Does nothing when it is up to date.
#
# TORCH   pip's arguments for torch. Pinned, because what else PyPI offers is often gigabytes of CUDA:
#           TORCH="torch==2.13.0 --index-url https://download.pytorch.org/whl/cpu"
#         "system" takes the torch that PYTHON already has, as on a machine with a vendor's build.
# PYTHON  the interpreter, 3.11 or newer.
set -euo pipefail
cd "$(dirname "$0")/.."

torch=${TORCH:-torch==2.13.0}
python=${PYTHON:-python3}

"$python" -c 'import sys; sys.exit(sys.version_info < (3, 11))' || {
    echo "ci/env.sh: PYTHON is $("$python" --version); accepted: 3.11 or newer" >&2
    exit 1
}

# What the environment depends on, its own place included: a moved checkout needs a new one.
wanted=$({ echo "$PWD $torch"; "$python" -VV; command -v "$python"; cat pyproject.toml; } | cksum)
stamp=.venv/m3_hw.stamp
if [ -f "$stamp" ] && [ "$(cat "$stamp")" = "$wanted" ]; then
    exit 0
fi

echo "Making .venv with $("$python" --version)"
rm -rf .venv
if [ "$torch" = system ]; then
    "$python" -c 'import torch' || {
        echo "ci/env.sh: TORCH is \"system\", but $python has no torch" >&2
        exit 1
    }
    "$python" -m venv --system-site-packages .venv
else
    "$python" -m venv .venv
    echo "Installing $torch (minutes)"
    read -ra requirement <<<"$torch"
    .venv/bin/python -m pip install --quiet "${requirement[@]}"
fi
echo "Installing the package with its test and dev extras (minutes)"
.venv/bin/python -m pip install --quiet --editable ".[test,dev]"
echo "$wanted" >"$stamp"

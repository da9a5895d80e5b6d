"""What `import m3_hw` costs."""

import json
import subprocess
import sys

PROGRAM = """
import json, sys, time
import torch
before, start = set(sys.modules), time.perf_counter()
import m3_hw
seconds = time.perf_counter() - start
print(json.dumps([seconds, sorted({name.partition(".")[0] for name in set(sys.modules) - before}), sorted(sys.modules)]))
"""
LIMIT = 0.150  # seconds beyond torch


def run_import() -> tuple[float, set[str], set[str]]:
    """Seconds of the import, top-level modules that it brought, every module that is loaded."""
    done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, check=True, timeout=120)
    seconds, brought, loaded = json.loads(done.stdout)
    return seconds, set(brought), set(loaded)


def test_import_brings_no_accelerator_and_no_tool() -> None:
    _, brought, loaded = run_import()
    assert not brought & {"triton", "torch_npu", "transformers", "matplotlib", "rich", "typer", "psutil", "pytest", "safetensors"}
    assert "triton" not in loaded
    assert "torch_npu" not in loaded
    assert not {name for name in loaded if name.startswith("m3_hw.backends.")}


def test_import_is_quick() -> None:
    best = run_import()[0]
    for _ in range(4):  # A busy machine only ever adds time, so one run under the limit proves it.
        if best < LIMIT:
            break
        best = min(best, run_import()[0])
    assert best < LIMIT

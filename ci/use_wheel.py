"""Proves an installed wheel: imports every operator of every backend and calls each operator's first sample."""

import importlib
import sys
from pathlib import Path

import m3_hw
from m3_hw.backend import BUILT_IN, Backend
from m3_hw.dispatch import specs
from m3_hw.draw import Draw


def main() -> int:
    if "site-packages" not in Path(m3_hw.__file__).parts:
        print(f"m3_hw comes from {m3_hw.__file__}, not from an installed wheel", file=sys.stderr)
        return 1
    imported = 0
    for name, package in BUILT_IN.items():
        backend = Backend(name, package)
        gaps = {gap.op for gap in backend.gaps}
        for op in specs():
            if backend.has(op):
                importlib.import_module(f"{package}.{op}")
                imported += 1
            elif op not in gaps:
                print(f"{name} has neither {op} nor a gap that says why: was a file left out of the wheel?", file=sys.stderr)
                return 1
    with m3_hw.use_backend("cpu"):
        for op, spec in specs().items():
            getattr(m3_hw, op)(**spec.samples[0].make(Draw(0), spec.dtypes[0]))
    print(f"Wheel in a clean environment: imported {imported} operators of {len(BUILT_IN)} backends, called {len(specs())} on the CPU")
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""The CPU's operators with tiles of a few rows: what happens only from the second tile on happens in the smallest sample."""

from importlib import import_module

import pytest

from m3_hw.dispatch import specs
from m3_hw.parity.run import Options, run

SMALL_TILES = {
    "_tiles": {"ELEMENTS": 256},
    "_attention": {"SPLIT": 48, "FEW_ROWS": 64},
    "dense_attention": {"TILE": 3},
    "select_blocks": {"ROWS": 16, "KEYS": 16},
    "sparse_attention": {"TILE": 5, "GATHERED": 300},
    "unpermute_tokens": {"TILE": 3},
}


@pytest.mark.parametrize("op", sorted(specs()))
def test_tiles_of_a_few_rows_change_nothing(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for module, sizes in SMALL_TILES.items():
        for name, size in sizes.items():
            monkeypatch.setattr(import_module(f"m3_hw.backends.cpu.{module}"), name, size)
    report = run(Options(ops=(op,), backends=("cpu",), checks=("parity", "strided")))
    assert report.passed, [f"{r.case.id}: {r.message}" for r in report.results if r.status == "fail"]

"""Synthetic reports for the tests of what people read of them."""

import math
from typing import Any

from m3_hw.parity.results import Case, Report, Result

NAN, INF = math.nan, math.inf
HOSTILE = 'case <b>&"</script><!-- ünïcode 漢 | `x`'
"""A name that breaks HTML, XML, Markdown and rich markup if it isn't escaped."""


def rel_l2(value: float, *, worst_row: float = 0.0, nonfinite: int = 0, mixed: bool = True) -> dict[str, Any]:
    """Metrics of a floating output that the rel_l2 rule judges."""
    return {
        "elements": 512,
        "nonfinite_mismatches": nonfinite,
        "rel_l2": value,
        "calc_diff": value * value / 2,
        "cosine": 1.0,
        "max_abs": 0.25,
        "worst_row": {"row": 3, "rel_l2": worst_row},
        "max_ulp": {"ulp": 2, "index": [3, 17], "actual": 1.5, "golden": 1.4921875},
        "within_ulp": {"1": 0.99995, "2": 1.0, "16": 1.0},
        "ascend_mixed": {"passed": mixed, "right_share": 1.0 if mixed else 0.5, "max_error": 0.25, "limit": 1.0},
        "small_values": {"count": 7, "errors": 0},
    }


REL_L2 = {
    "rule": "rel_l2",
    "limit": 4e-3,
    "worst_row": 1e-2,
    "floor": 0.0,
    "margin": 0.0,
    "order": "id",
    "reason": "one rounding at the end",
}
ULP = {"rule": "ulp", "limit": 1, "worst_row": 0.0, "floor": 2.0**-20, "margin": 0.0, "order": "id", "reason": "the neighbour at most"}
EXACT = {"rule": "exact", "limit": 0.0, "worst_row": 0.0, "floor": 0.0, "margin": 0.0, "order": "id", "reason": "a copy"}
SELECTION = {"rule": "selection", "limit": 0.0, "worst_row": 0.0, "floor": 0.0, "margin": 1e-3, "order": "id", "reason": "fp32 noise"}


def example() -> Report:
    """Passes, failures with and without numbers, gaps, unavailable, near ties and a certify aggregate."""
    attention = ("sparse_attention", "cpu")
    results = [
        Result(
            Case(*attention, "bfloat16", "decode"),
            "parity",
            "pass",
            "",
            0.5,
            metrics={"out": rel_l2(1e-3, worst_row=9e-3)},
            tolerance={"out": REL_L2},
        ),
        Result(
            Case(*attention, "bfloat16", "prefill"), "parity", "pass", "", 0.25, metrics={"out": rel_l2(2e-3)}, tolerance={"out": REL_L2}
        ),
        Result(Case(*attention, "bfloat16", "prefill"), "unowned", "pass", note="scaled to 1/8 of its length"),
        Result(
            Case(*attention, "float16", "decode"),
            "parity",
            "fail",
            "out: NaN or inf differ at 5 of 512 elements, first at [3, 17]: has nan, wanted 1.5",
            metrics={"out": rel_l2(NAN, worst_row=INF, nonfinite=5, mixed=False)},
            tolerance={"out": REL_L2},
        ),
        Result(Case(*attention, "float32", HOSTILE), "strided", "fail", "[bold]boom[/bold] \x1b[31m & <tag> \x00 \ud800 </script>"),
        Result(
            Case("sparse_attention", "ascend", "bfloat16", "decode"),
            "parity",
            "pass",
            metrics={"out": rel_l2(3.9e-3)},
            tolerance={"out": REL_L2},
        ),
        Result(Case("sparse_attention", "ascend", "bfloat16", "long"), "parity", "gap", "head_dim above 128"),
        Result(
            Case("select_blocks", "cpu", "bfloat16", "decode"),
            "parity",
            "pass",
            metrics={"ids": {"rows": 40, "equal_rows": 37, "near_tie_rows": 3, "wrong_rows": 0}},
            tolerance={"ids": SELECTION},
        ),
        Result(
            Case("rms_norm", "cpu", "bfloat16", "random", "stress"),
            "parity",
            "pass",
            cases=2000,
            metrics={"y": {**rel_l2(2e-3), "judged_ulp": 1}},
            tolerance={"y": ULP},
        ),
        Result(
            Case("permute_tokens", "cpu", "float32", "empty"),
            "parity",
            "pass",
            metrics={"source": {"mismatches": 0}},
            tolerance={"source": EXACT},
        ),
        *(Result(Case("rope", "cuda", dtype, "neox"), "parity", "gap", "not written yet") for dtype in ("float32", "bfloat16")),
        Result(Case("rms_norm", "cuda", "bfloat16", "rows"), "parity", "unavailable", "no CUDA device"),
    ]
    environment = {
        "versions": {"python": "3.11.2", "torch": "2.13.0", "triton": None},
        "system": {"os": "Linux", "memory": 137438953472, "cpu_features": {"torch_capability": "AVX512", "flags": ["avx2", "fma"]}},
        "cann": None,
        "devices": {"cpu": {"cores": 2}, "cuda": [], "npu": [{"name": "Ascend910B", "memory": 1 << 36}]},
        "variables": {"OMP_NUM_THREADS": "1"},
    }
    command = "m3-hw parity run --backend cpu <&>"
    return Report("small", 7, "2026-12-03T17:00:00.123456+00:00", command, environment, simulated=["ascend"], results=results)


def large(groups: int, per_group: int) -> Report:
    """Many results: rel_l2 of group i is i / 1000, cases carry padding of a realistic length."""
    results = [
        Result(
            Case(f"op_{i:03d}", "cpu", "float32", f"sample_{j}"), "parity", "pass", metrics={"y": rel_l2(i / 1000)}, tolerance={"y": REL_L2}
        )
        for i in range(groups)
        for j in range(per_group)
    ]
    return Report("small", 0, "2026-12-03T17:00:00+00:00", "m3-hw parity run", {}, results=results)


def empty() -> Report:
    return Report("small", 0, "2026-12-03T17:00:00+00:00", "m3-hw parity run", {})

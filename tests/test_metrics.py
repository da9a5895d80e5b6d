"""The numbers of docs/numerics.md, against values worked out by hand and against numpy."""

import dataclasses

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from m3_hw.dispatch import specs
from m3_hw.parity.judge import judge
from m3_hw.parity.metrics import (
    MIXED_TOLERANCES,
    calc_diff,
    cosine,
    double_benchmark,
    measure,
    rel_l2,
    row_rel_l2,
    ulp,
    ulp_distance,
    worse,
)
from m3_hw.spec import Tolerance

NAN, INF = torch.nan, torch.inf


def test_cosine_is_blind_to_a_wrong_scale_and_calc_diff_is_not() -> None:
    g = torch.linspace(-1, 2, 100)
    assert cosine(8 * g, g) == pytest.approx(1.0)
    assert calc_diff(8 * g, g) == pytest.approx(0.754, abs=1e-3)
    assert calc_diff(0.356 * g, g) == pytest.approx(0.368, abs=1e-3)
    assert rel_l2(8 * g, g) == pytest.approx(7.0)


def test_rel_l2_of_zeros() -> None:
    zero = torch.zeros(3)
    assert rel_l2(zero, zero) == 0
    assert rel_l2(torch.ones(3), zero) == INF


def test_rel_l2_of_less_than_a_unit_is_the_absolute_error() -> None:
    golden, actual = torch.tensor([[1e-6, 0.0], [30.0, 40.0]]), torch.tensor([[1e-6, 1e-3], [30.0, 40.5]])
    assert row_rel_l2(actual, golden)[0] > 100
    assert row_rel_l2(actual, golden, unit=1.0).tolist() == pytest.approx([1e-3 / 2**0.5, 0.01])
    assert rel_l2(actual[0], golden[0], unit=1.0) == pytest.approx(1e-3 / 2**0.5)
    assert measure(actual, golden, unit=1.0)["worst_row"] == {"row": 1, "rel_l2": pytest.approx(0.01)}


def test_one_corrupted_row_shows_in_the_worst_row_and_hides_in_the_global_metric() -> None:
    g = torch.ones(1000, 8)
    a = g.clone()
    a[617] *= 1.5
    assert rel_l2(a, g) < 0.02
    assert row_rel_l2(a, g).max().item() == pytest.approx(0.5)
    assert measure(a, g.double())["worst_row"] == {"row": 617, "rel_l2": pytest.approx(0.5)}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_neighbouring_values_are_one_ulp_apart(dtype: torch.dtype) -> None:
    width = {4: torch.int32, 2: torch.int16, 1: torch.int8}[dtype.itemsize]
    bits = torch.arange(1, 100, dtype=width)
    positive, following = bits.view(dtype), (bits + 1).view(dtype)
    assert (ulp_distance(positive, following) == 1).all()


def test_ulp_distance_crosses_zero_and_takes_minus_zero_as_zero() -> None:
    smallest = torch.tensor([1], dtype=torch.int32).view(torch.float32)
    assert ulp_distance(smallest, -smallest).item() == 2
    assert ulp_distance(torch.tensor([-0.0]), torch.tensor([0.0])).item() == 0


@settings(max_examples=100, deadline=None)
@given(st.floats(width=32, allow_nan=False, allow_infinity=False), st.integers(0, 50))
def test_ulp_distance_counts_numpys_neighbours(value: float, steps: int) -> None:
    other = np.float32(value)
    for _ in range(steps):
        other = np.nextafter(other, np.float32(np.inf))
    if np.isfinite(other):
        assert ulp_distance(torch.tensor([value]), torch.tensor([float(other)])).item() == steps


@settings(max_examples=50, deadline=None)
@given(st.floats(2.0**-100, 2.0**100))
def test_ulp_is_numpys_spacing(value: float) -> None:
    value = float(np.float32(value))
    assert ulp(torch.tensor([value]), torch.float32).item() == np.spacing(np.float32(value))


def test_measure_reports_every_number() -> None:
    g = torch.tensor([[1.0, 2.0, 3.0, 2.0**-20]], dtype=torch.float64)
    a = torch.tensor([[1.0, 2.0, 3.0, 2.0**-12]], dtype=torch.bfloat16)
    metrics = measure(a, g)
    assert metrics["max_ulp"]["index"] == [0, 3]
    assert metrics["max_ulp"]["actual"] == 2.0**-12
    assert metrics["within_ulp"] == {"1": 0.75, "2": 0.75, "16": 0.75}
    assert metrics["small_values"] == {"count": 1, "errors": 1}
    assert metrics["max_abs"] == pytest.approx(2**-12 - 2**-20)


def test_nonfinite_values_are_counted_and_the_rest_is_judged_without_them() -> None:
    g = torch.tensor([[1.0, NAN, INF, -INF, 2.0]], dtype=torch.float64)
    same = measure(g.float(), g)
    assert same["nonfinite_mismatches"] == 0
    assert same["rel_l2"] == 0
    assert measure(torch.tensor([[1.0, 0.0, INF, INF, 2.0]]), g)["nonfinite_mismatches"] == 2


@pytest.mark.parametrize(("dtype", "limits"), MIXED_TOLERANCES.items())
def test_ascend_mixed_tolerance_asks_for_99_percent_right(dtype: torch.dtype, limits: tuple[float, float, float]) -> None:
    rtol, atol, _ = limits
    g = torch.ones(1000, dtype=torch.float64)
    wrong = 1 + 4 * (atol + rtol)
    for count, passed in ((10, True), (11, False)):
        a = g.clone()
        a[:count] = wrong
        mixed = measure(a.to(dtype), g)["ascend_mixed"]
        assert mixed["passed"] is passed
        assert mixed["right_share"] == pytest.approx(1 - count / 1000)


def test_ascend_mixed_tolerance_refuses_one_large_error() -> None:
    g = torch.ones(1000, dtype=torch.float64)
    a = g.float()
    a[5] += 0.011  # above 0.01, and above 32 ULP
    assert not measure(a, g)["ascend_mixed"]["passed"]
    large = g * 2.0**22  # there, 32 ULP is 16
    b = large.float()
    b[5] += 8
    assert measure(b, large)["ascend_mixed"]["passed"]


def test_double_benchmark_names_the_strictest_level_that_is_reached() -> None:
    g = torch.linspace(1, 2, 1000, dtype=torch.float64)
    gpu = (g * (1 + 1e-3)).float()
    levels = {}
    for factor in (1.0, 1.15, 1.4, 1.9, 3.0):
        levels[factor] = double_benchmark((g * (1 + factor * 1e-3)).float(), gpu, g)["level"]
    assert levels == {1.0: "L2", 1.15: "L2", 1.4: "L1", 1.9: "L0", 3.0: "none"}


def test_double_benchmark_counts_small_values_apart() -> None:
    g = torch.tensor([1.0, 2.0**-20], dtype=torch.float64)
    gpu = g.float()
    npu = torch.tensor([1.0, 2.0**-18])
    result = double_benchmark(npu, gpu, g)
    assert result["small_values"] == {"npu_errors": 1, "gpu_errors": 0}
    assert result["mare"]["ratio"] == 0


def test_worse_keeps_the_worse_number_and_adds_counts() -> None:
    g = torch.ones(4, 8, dtype=torch.float64)
    good, bad = measure(g.float(), g), measure(g.float() * 1.25, g)
    merged = worse(good, bad)
    assert merged["rel_l2"] == bad["rel_l2"]
    assert merged["cosine"] == min(good["cosine"], bad["cosine"])
    assert merged["elements"] == 64
    assert merged["ascend_mixed"]["passed"] is False
    assert merged["max_ulp"] == bad["max_ulp"]


def _judge_y(actual: torch.Tensor, golden: torch.Tensor, **limits: object):
    spec = dataclasses.replace(specs()["rms_norm"], tolerances={"y": {actual.dtype: Tolerance(reason="test", **limits)}})
    return judge(spec, {}, actual.dtype, {"y": actual}, {"y": golden})


def test_ulp_rule_forgives_cancellation_noise_under_the_floor_only() -> None:
    g = torch.tensor([[1.0, 2.0**-30]], dtype=torch.float64)
    a = torch.tensor([[1.0, 0.0]], dtype=torch.bfloat16)
    assert _judge_y(a, g, rule="ulp", limit=1, floor=2.0**-20).passed
    strict = _judge_y(a, g, rule="ulp", limit=1)
    assert not strict.passed
    assert "ULP at [0, 1]" in strict.message


def test_rel_l2_rule_judges_the_whole_and_the_worst_row() -> None:
    g = torch.ones(1000, 8, dtype=torch.float64)
    a = g.float()
    a[3] *= 1.5
    assert "row 3 has rel_l2 0.5" in _judge_y(a, g, rule="rel_l2", limit=0.1, worst_row=0.1).message
    assert "rel_l2 0.25" in _judge_y(g.float() * 1.25, g, rule="rel_l2", limit=0.1, worst_row=1).message


@pytest.mark.parametrize("rule", ["rel_l2", "ulp", "exact"])
def test_every_rule_refuses_nan_where_a_number_is_wanted(rule: str) -> None:
    g = torch.ones(2, 8, dtype=torch.float64)
    a = g.float()
    a[1, 2] = NAN
    judgement = _judge_y(a, g, rule=rule, limit=1e9, worst_row=1e9)
    assert not judgement.passed
    assert "[1, 2]" in judgement.message


def test_a_wrong_shape_is_named() -> None:
    assert "shape [2, 8]; wanted: [1, 8]" in _judge_y(torch.ones(2, 8), torch.ones(1, 8).double(), rule="exact").message


def _judge_ids(actual: list[int], golden: list[int], scores: list[float], order: str = "id"):
    limits = Tolerance(rule="selection", margin=2.0**-10, order=order, reason="test")
    table = {"ids": {torch.float32: limits}}
    score = torch.tensor([scores], dtype=torch.float64)
    spec = dataclasses.replace(specs()["select_blocks"], tolerances=table, scores=lambda _: score)
    return judge(spec, {}, torch.float32, {"ids": torch.tensor([actual]).int()}, {"ids": torch.tensor([golden]).int()})


def test_a_swap_within_the_margin_is_a_near_tie_and_counted() -> None:
    judgement = _judge_ids([0, 2], [0, 1], [INF, 1.0, 1.0 - 2.0**-12, -3.0])
    assert judgement.passed
    assert judgement.metrics["ids"] == {"rows": 1, "equal_rows": 0, "near_tie_rows": 1, "wrong_rows": 0}


@pytest.mark.parametrize(
    ("actual", "golden", "scores", "what"),
    [
        ([0, 2], [0, 1], [INF, 1.0, 0.9, -3.0], "0.1 from the K-th"),
        ([1, 2], [0, 1], [INF, 1.0, 1.0, 1.0], "0 (forced)"),
        ([1, 1], [0, 1], [1.0, 1.0, 1.0, 1.0], "repeated"),
        ([0, 3], [0, 1], [1.0, 1.0, 1.0, -INF], "no candidate"),
        ([0, 9], [0, 1], [1.0, 1.0, 1.0, 1.0], "no candidate"),
        ([1, 0], [0, 1], [1.0, 1.0, 1.0, 1.0], "ascend"),
        ([0, -1], [0, 1], [1.0, 1.0, 1.0, 1.0], "as many ids"),
        ([-1, 0], [0, -1], [1.0, 1.0, 1.0, 1.0], "packed left"),
        ([0, -7], [0, -1], [1.0, 1.0, 1.0, 1.0], "packed left"),
    ],
)
def test_a_wrong_selection_is_named(actual: list[int], golden: list[int], scores: list[float], what: str) -> None:
    judgement = _judge_ids(actual, golden, scores)
    assert not judgement.passed
    assert what in judgement.message
    assert judgement.metrics["ids"]["wrong_rows"] == 1


def test_equal_scores_are_no_near_tie_the_lower_id_wins() -> None:
    judgement = _judge_ids([0, 2], [0, 1], [INF, 1.0, 1.0, -3.0])
    assert not judgement.passed
    assert "2 in the place of 1 of equal score" in judgement.message
    assert "2 before 1 of equal score" in _judge_ids([2, 1], [1, 2], [0.0, 1.0, 1.0], order="score").message


def test_order_by_score_may_swap_near_ties_only() -> None:
    assert _judge_ids([2, 1], [1, 2], [0.0, 1.0, 1.0 - 2.0**-12], order="score").passed
    assert "descend" in _judge_ids([2, 1], [1, 2], [0.0, 2.0, 1.0], order="score").message


def test_nan_scores_do_not_widen_the_margin() -> None:
    lowest = torch.finfo(torch.float64).min
    assert not _judge_ids([0, 2], [0, 1], [INF, 1.0, 0.5, lowest]).passed

"""Numbers that say how far an output is from the golden one. Every one is reported; the spec's rule decides.

Source: the definitions of docs/numerics.md; `calc_diff` after DeepGEMM, the mixed tolerance and the double benchmark
after CANN's published accuracy standards.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3_hw.contract import FP8

Metrics = dict[str, Any]
"""JSON-able numbers of one output."""

_INTEGER_VIEW = {
    torch.float64: torch.int64,
    torch.float32: torch.int32,
    torch.bfloat16: torch.int16,
    torch.float16: torch.int16,
    FP8: torch.int8,
}
_MANTISSA_BITS = {torch.float64: 52, torch.float32: 23, torch.bfloat16: 7, torch.float16: 10, FP8: 3}


class MixedTolerance(NamedTuple):
    """CANN's community standard for one dtype: right if |a - g| <= atol + rtol |g|; no error above max(fixed, 32 ULP)."""

    rtol: float
    atol: float
    fixed: float


MIXED_TOLERANCES = {
    torch.float16: MixedTolerance(2**-9, 2**-9, 0.1),
    torch.bfloat16: MixedTolerance(2**-6, 2**-6, 1.0),
    torch.float32: MixedTolerance(2**-10, 2**-16, 0.01),
    FP8: MixedTolerance(2**-2, 2**-4, 1.0),
}
RIGHT_SHARE = 0.99

SMALL_VALUES = {torch.bfloat16: (2**-8, 2**-16), torch.float16: (2**-11, 2**-16), torch.float32: (2**-14, 2**-30)}
"""By dtype: magnitudes below the first are small; there, an error is a difference above the second."""

LEVELS = {"L2": (2.0, 1.2, 1.2), "L1": (5.0, 1.5, 1.5), "L0": (10.0, 2.0, 2.0)}
"""CANN's commercial standard, strictest first: limits on the ratios of MARE, MERE and RMSE."""


def rel_l2(actual: Tensor, golden: Tensor, unit: float = 0.0) -> float:
    """||a - g|| / max(||g||, unit sqrt(n)) in fp64; 0 if both are zero, inf if only the golden one is and unit is 0."""
    size = max(golden.double().norm().item(), unit * golden.numel() ** 0.5)
    return _ratio((actual.double() - golden.double()).norm().item(), size)


def calc_diff(actual: Tensor, golden: Tensor) -> float:
    """1 - 2 <a, g> / (||a||^2 + ||g||^2) in fp64: unlike the cosine, it sees a wrong scale."""
    a, g = actual.double().flatten(), golden.double().flatten()
    total = (a.square().sum() + g.square().sum()).item()
    return 1 - 2 * (a @ g).item() / total if total else 0.0


def cosine(actual: Tensor, golden: Tensor) -> float:
    """<a, g> / (||a|| ||g||) in fp64. Reported, never decides: blind to a wrong scale."""
    a, g = actual.double().flatten(), golden.double().flatten()
    norms = (a.norm() * g.norm()).item()
    return (a @ g).item() / norms if norms else 1.0


def row_rel_l2(actual: Tensor, golden: Tensor, unit: float = 0.0) -> Tensor:
    """rel_l2 of every row (last axis): [rows] fp64. One corrupted row hides in a global metric."""
    g = golden.double().reshape(-1, golden.shape[-1] if golden.dim() else 1)
    distance = (actual.double().reshape(g.shape) - g).norm(dim=-1)
    return torch.where(distance == 0, 0.0, distance / g.norm(dim=-1).clamp(min=unit * g.shape[-1] ** 0.5))


def ulp_distance(actual: Tensor, golden: Tensor) -> Tensor:
    """Representable values between two tensors of one dtype, as int64; finite values only."""
    return (_ordered(actual) - _ordered(golden)).abs()


def _ordered(x: Tensor) -> Tensor:
    """Bits as integers in the order of the values; -0 and +0 both 0."""
    bits = x.contiguous().view(_INTEGER_VIEW[x.dtype])
    lowest = torch.iinfo(bits.dtype).min
    wide = bits.long()
    return torch.where(wide < 0, lowest - wide, wide)


def ulp(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Size of one unit in the last place of `dtype` at each value of x, fp64."""
    smallest = torch.finfo(dtype).smallest_normal
    exponent = torch.frexp(x.double().abs().clamp(min=smallest)).exponent - 1
    return torch.ldexp(torch.ones_like(x, dtype=torch.float64), exponent - _MANTISSA_BITS[dtype])


def nonfinite_mismatch(actual: Tensor, golden: Tensor) -> Tensor:
    """Where NaN or a signed infinity stands in one and not in the other."""
    a, g = actual.double(), golden.double()
    return (a.isnan() != g.isnan()) | ((a == torch.inf) != (g == torch.inf)) | ((a == -torch.inf) != (g == -torch.inf))


def finite(actual: Tensor, golden: Tensor) -> tuple[Tensor, Tensor]:
    """Both with zeros where either isn't finite: what is judged once the non-finite positions agree."""
    good = actual.double().isfinite() & golden.double().isfinite()
    return torch.where(good, actual.double(), 0.0), torch.where(good, golden.double(), 0.0)


def measure(actual: Tensor, golden: Tensor, unit: float = 0.0) -> Metrics:
    """Every metric of a floating output.

    Args:
        actual: In the output's dtype.
        golden: fp64, same shape, not rounded.
        unit: Of the tolerance: the least root mean square that rel_l2 divides by.

    Returns:
        rel_l2, calc_diff, cosine, max_abs, worst_row, max_ulp, within_ulp, ascend_mixed, small_values; `elements` and
        `nonfinite_mismatches` always. On finite values only.
    """
    dtype = actual.dtype
    rounded = golden.to(dtype)
    metrics: Metrics = {"elements": actual.numel(), "nonfinite_mismatches": int(nonfinite_mismatch(actual, rounded).sum())}
    if not actual.numel():
        return metrics
    a, g = finite(actual, torch.where(rounded.double().isfinite(), golden.double(), rounded.double()))
    rows = row_rel_l2(a, g, unit)
    worst = int(rows.argmax())
    error = (a - g).abs()
    return {
        **metrics,
        "rel_l2": rel_l2(a, g, unit),
        "calc_diff": calc_diff(a, g),
        "cosine": cosine(a, g),
        "max_abs": error.max().item(),
        "worst_row": {"row": worst, "rel_l2": rows[worst].item()},
        **_ulp_metrics(a.to(dtype), g.to(dtype)),
        **_ascend_mixed(error, g, dtype),
        **_small_values(error, g, dtype),
    }


def _ulp_metrics(actual: Tensor, golden: Tensor) -> Metrics:
    distance = ulp_distance(actual, golden)
    worst = int(distance.argmax())
    index = [int(i) for i in torch.unravel_index(torch.tensor(worst), distance.shape)] if distance.dim() else []
    at = {"actual": actual.flatten()[worst].item(), "golden": golden.flatten()[worst].item()}
    return {
        "max_ulp": {"ulp": int(distance.max()), "index": index, **at},
        "within_ulp": {str(n): (distance <= n).double().mean().item() for n in (1, 2, 16)},
    }


def _ascend_mixed(error: Tensor, golden: Tensor, dtype: torch.dtype) -> Metrics:
    if dtype not in MIXED_TOLERANCES:
        return {}
    rtol, atol, fixed = MIXED_TOLERANCES[dtype]
    right = (error <= atol + rtol * golden.abs()).double().mean().item()
    within = bool((error <= (32 * ulp(golden, dtype)).clamp(min=fixed)).all())
    mixed = {"passed": right >= RIGHT_SHARE and within, "right_share": right, "max_error": error.max().item(), "limit": fixed}
    return {"ascend_mixed": mixed}


def _small_values(error: Tensor, golden: Tensor, dtype: torch.dtype) -> Metrics:
    if dtype not in SMALL_VALUES:
        return {}
    below, above = SMALL_VALUES[dtype]
    small = golden.abs() < below
    return {"small_values": {"count": int(small.sum()), "errors": int((small & (error > above)).sum())}}


def double_benchmark(npu: Tensor, gpu: Tensor, golden: Tensor) -> Metrics:
    """CANN's commercial standard: the NPU's errors as multiples of the GPU's, both against the fp64 golden.

    MARE and MERE = max and mean of |a - g| / (|g| + 1e-7); RMSE = sqrt(mean((a - g)^2)). Small values are counted apart.

    Returns:
        mare, mere and rmse, each {npu, gpu, ratio}; small_values {npu_errors, gpu_errors}; `level`, the strictest that
        is reached, or "none".
    """
    below, above = SMALL_VALUES.get(npu.dtype, (0.0, 0.0))
    g = golden.double()
    good = g.isfinite() & npu.double().isfinite() & gpu.double().isfinite() & (g.abs() >= below)
    small = g.abs() < below
    errors = {}
    for who, actual in (("npu", npu), ("gpu", gpu)):
        difference = (actual.double() - g).abs()[good]
        relative = difference / (g.abs()[good] + 1e-7)
        errors[who] = [f(x) if x.numel() else 0.0 for f, x in ((_max, relative), (_mean, relative), (_rms, difference))]
    ratios = [_ratio(a, b) for a, b in zip(errors["npu"], errors["gpu"], strict=True)]
    level = next((name for name, limits in LEVELS.items() if all(r <= m for r, m in zip(ratios, limits, strict=True))), "none")
    counts = {f"{who}_errors": int((small & ((x.double() - g).abs() > above)).sum()) for who, x in (("npu", npu), ("gpu", gpu))}
    named = zip(("mare", "mere", "rmse"), errors["npu"], errors["gpu"], ratios, strict=True)
    return {**{name: {"npu": a, "gpu": b, "ratio": r} for name, a, b, r in named}, "small_values": counts, "level": level}


def _max(x: Tensor) -> float:
    return x.max().item()


def _mean(x: Tensor) -> float:
    return x.mean().item()


def _rms(x: Tensor) -> float:
    return x.square().mean().sqrt().item()


def _ratio(a: float, b: float) -> float:
    """a / b; 0 for 0 / 0, inf for a / 0."""
    return a / b if b else (torch.inf if a else 0.0)


def worse(a: Metrics, b: Metrics) -> Metrics:
    """The worse of two cases' metrics of one output, number by number; counts add up."""
    merged = {**b, **a}
    for key in a.keys() & b.keys():
        merged[key] = _worse_of(key, a[key], b[key])
    return merged


_COUNTS = {"elements", "nonfinite_mismatches", "mismatches", "rows", "equal_rows", "near_tie_rows", "wrong_rows", "count", "errors"}
_LEAST = {"cosine", "1", "2", "16", "right_share", "passed"}
_DECIDED_BY = {"worst_row": "rel_l2", "max_ulp": "ulp"}


def _worse_of(key: str, a: Any, b: Any) -> Any:
    if key in _DECIDED_BY:
        return max(a, b, key=lambda entry: entry[_DECIDED_BY[key]])
    if isinstance(a, dict):
        return {k: _worse_of(k, a[k], b[k]) for k in a}
    if key in _COUNTS:
        return a + b
    return min(a, b) if key in _LEAST else max(a, b)

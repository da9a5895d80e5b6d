"""Quantisation to fp8 with the scale of the largest value."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from m3_hw.contract import FLOATS, FP8, expect_dtype, expect_rank, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, exact_tolerances, spoil

FP8_MAX = 448.0
GROUP = 128
"""Side of a group or block with one scale."""
GRANULARITIES = ("tensor", "row", "group128", "block128")


def quantize_fp8(x: Tensor, *, granularity: str) -> tuple[Tensor, Tensor]:
    """Quantise to fp8 e4m3fn, each group with the scale that takes its largest magnitude to 448.

    scale = amax(|x|) / 448 over the group, 1 where that is 0; y = round(clamp(x / scale, -448, 448))

    Args:
        x: [M, Kd], float32, bfloat16 or float16, Kd >= 1.
        granularity: What shares a scale: "tensor"; "row"; "group128", 128 values of a row; "block128", a block of 128 rows and
            128 columns. Groups at the edges are smaller.

    Returns:
        y: [M, Kd] fp8 e4m3fn, fresh and contiguous.
        scale: float32: [1, 1], [M, 1], [M, ceil(Kd/128)] or [ceil(M/128), ceil(Kd/128)]; what y is multiplied by to give x.

    Raises:
        ContractError: x is not [M, Kd] or not of these dtypes; an unknown granularity.

    Numerics: Both divisions in fp32, correctly rounded: no product with a reciprocal; one rounding to fp8, to nearest even. A
        scale that underflows to 0 counts as 0. A group that holds NaN has scale NaN, one that holds inf (and no NaN) scale
        inf: either way it dequantises to NaN, as a mark.

    Source: the e4m3 recipes of DeepGEMM (1 x 128 and 128 x 128) and of vLLM (row, tensor).
    """
    rows, columns = _group_shape(x.shape[0], x.shape[1], granularity)
    num_rows, num_columns = _scale_shape(x.shape[0], x.shape[1], granularity)
    wide = x.to(torch.float32)
    padded = F.pad(wide.abs(), (0, num_columns * columns - x.shape[1], 0, num_rows * rows - x.shape[0]))
    amax = padded.view(num_rows, rows, num_columns, columns).amax((1, 3))
    scale = amax / amax.new_full((), FP8_MAX)  # a tensor: dividing by a Python number multiplies by its reciprocal on CUDA
    scale = torch.where(scale == 0, 1, scale)
    return to_fp8(wide, spread_scale(scale, x.shape[0], x.shape[1])), scale


def to_fp8(x: Tensor, scale: Tensor) -> Tensor:
    """x / scale [fp32] in e4m3fn: clamped, since the cast itself makes NaN of what is too large; NaN stays NaN."""
    return (x / scale).clamp(-FP8_MAX, FP8_MAX).to(FP8)


def spread_scale(scale: Tensor, num_rows: int, num_columns: int) -> Tensor:
    """The scale of every element: [num_rows, num_columns] from any of the granularities' shapes."""
    for axis, size in enumerate((num_rows, num_columns)):
        groups = scale.shape[axis]
        length = 1 if groups == size else max(size, 1) if groups == 1 else GROUP
        scale = scale.index_select(axis, torch.arange(size, device=scale.device) // length)
    return scale


def _group_shape(num_rows: int, num_columns: int, granularity: str) -> tuple[int, int]:
    """Rows and columns that share a scale."""
    return {"tensor": (max(num_rows, 1), num_columns), "row": (1, num_columns), "group128": (1, GROUP), "block128": (GROUP, GROUP)}[
        granularity
    ]


def _scale_shape(num_rows: int, num_columns: int, granularity: str) -> tuple[int, int]:
    """Shape of the scale; a tensor has one even without rows."""
    rows, columns = _group_shape(num_rows, num_columns, granularity)
    return 1 if granularity == "tensor" else -(-num_rows // rows), -(-num_columns // columns)


def _fake(x: Tensor, *, granularity: str) -> tuple[Tensor, Tensor]:
    scale = x.new_empty(_scale_shape(x.shape[0], x.shape[1], granularity), dtype=torch.float32)
    return torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format), scale


def _check(x: Tensor, *, granularity: str) -> None:
    expect_rank("x", x, "M Kd")
    if x.shape[1] == 0:
        fail("x", f"shape {list(x.shape)}", "[M, Kd] with Kd >= 1")
    expect_dtype("x", x, FLOATS[:3])
    if granularity not in GRANULARITIES:
        fail("granularity", repr(granularity), ", ".join(GRANULARITIES))


def _sample(
    num_rows: int, num_columns: int, granularity: str, change: Callable[[Tensor], None] = lambda x: None
) -> Callable[[Draw, torch.dtype], Call]:
    """Rows of different magnitudes, so that a scale of the wrong group shows."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        magnitudes = torch.exp2(draw.integers(-6, 7, (num_rows, 1)).float()).to(dtype)
        x = draw.values((num_rows, num_columns), dtype) * magnitudes
        change(x)
        return {"x": x, "granularity": granularity}

    return make


def _clear(x: Tensor) -> None:
    x[::2] = 0
    x[:, :GROUP] = 0


def _fade(x: Tensor) -> None:
    x.mul_(2.0**-14)


def _break(x: Tensor) -> None:
    x[0, 0], x[1, -1], x[2, 0], x[2, 1] = torch.nan, torch.inf, -torch.inf, torch.nan


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    return _sample(draw.integer(0, 300), draw.integer(1, 400), draw.choice(GRANULARITIES))(draw, dtype)


SPEC = OpSpec(
    reference=quantize_fp8,
    fake=_fake,
    check=_check,
    outputs=("y", "scale"),
    tolerances={
        "y": exact_tolerances("one fp32 division and one rounding to fp8"),
        "scale": exact_tolerances("one fp32 division of the largest magnitude"),
    },
    # Not in fp64: the fp32 divisions are the contract.
    golden=quantize_fp8,
    samples=(
        *(Sample(name=granularity, make=_sample(7, 300, granularity)) for granularity in GRANULARITIES),
        *(Sample(name=f"{granularity}_empty", make=_sample(0, 200, granularity)) for granularity in GRANULARITIES),
        *(Sample(name=f"{granularity}_zeros", make=_sample(6, 200, granularity, _clear)) for granularity in GRANULARITIES),
        *(Sample(name=f"{granularity}_not_finite", make=_sample(5, 150, granularity, _break)) for granularity in GRANULARITIES),
        *(Sample(name=f"{granularity}_faint", make=_sample(6, 200, granularity, _fade)) for granularity in GRANULARITIES),
        Sample(name="row_odd", make=_sample(13, 33, "row")),
        Sample(name="group128_one_column", make=_sample(5, 1, "group128")),
        Sample(name="block128_many", make=_sample(259, 257, "block128")),
        Sample(name="m3_tensor", tier="model", make=_sample(256, 6144, "tensor")),
        Sample(name="m3_row", tier="model", make=_sample(256, 6144, "row")),
        Sample(name="m3_group128", tier="model", make=_sample(256, 6144, "group128")),
        Sample(name="m3_weight", tier="model", make=_sample(3072, 6144, "block128")),
        Sample(name="long", tier="stress", make=_sample(16385, 3072, "group128")),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="x of rank 1", argument="x", change=spoil(x=lambda x: x[0])),
        ErrorSample(name="x of rank 3", argument="x", change=spoil(x=lambda x: x[None])),
        ErrorSample(name="x without columns", argument="x", change=spoil(x=lambda x: x[:, :0])),
        ErrorSample(name="integer x", argument="x", change=spoil(x=lambda x: x.int())),
        ErrorSample(name="x in float64", argument="x", change=spoil(x=lambda x: x.double())),
        ErrorSample(name="x in fp8", argument="x", change=spoil(x=lambda x: x.to(FP8))),
        ErrorSample(name="granularity unknown", argument="granularity", change=spoil(granularity="column")),
        ErrorSample(name="granularity empty", argument="granularity", change=spoil(granularity="")),
    ),
)

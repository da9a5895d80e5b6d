"""Matrix product of fp8 values with scales."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, FP8, expect_dtype, expect_rank, fail
from m3_hw.draw import RANGES, Draw
from m3_hw.ops.quantize_fp8 import GROUP, spread_scale, to_fp8
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, Tolerance, accumulate_dtype, reduction_tolerances, spoil, upcast


def gemm_fp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """Multiply what two fp8 matrices and their scales stand for.

    y = (a * a_scale) (b * b_scale)^T

    Args:
        a: [M, Kd] fp8 e4m3fn.
        b: [Nd, Kd] fp8 e4m3fn; Nd and Kd at least 1.
        a_scale, b_scale: float32, as `quantize_fp8` gives them. Their shapes say what shares a scale: rows of both, [M, 1] and
            [Nd, 1]; groups of 128 in a and blocks of 128 x 128 in b, [M, ceil(Kd/128)] and [ceil(Nd/128), ceil(Kd/128)];
            both tensors, [1, 1] and [1, 1]. Shapes that fit two of these mean the same in both.
        out_dtype: float32, bfloat16 or float16.

    Returns:
        [M, Nd] in out_dtype, fresh and contiguous.

    Raises:
        ContractError: A shape or dtype differs; the scales' shapes are none of the three pairs.

    Numerics: fp32 accumulation, one rounding, at the end. Tensor cores may add up to 128 products at their own width before
        those reach the fp32 sum.

    Source: the fp8 products of DeepGEMM (1 x 128 with 128 x 128) and of vLLM (row, tensor).
    """
    acc = accumulate_dtype(a.dtype)
    wide_a = a.to(acc) * spread_scale(a_scale, *a.shape)  # [M, Kd]
    wide_b = b.to(acc) * spread_scale(b_scale, *b.shape)  # [Nd, Kd]
    return (wide_a @ wide_b.T).to(out_dtype)


def _golden(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    """In fp64 from the dequantised values: quantisation error isn't the kernel's."""
    return gemm_fp8(**upcast({"a": a, "b": b, "a_scale": a_scale, "b_scale": b_scale}), out_dtype=torch.float64)


def _fake(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


def _check(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> None:
    expect_rank("a", a, "M Kd")
    if a.shape[1] == 0:
        fail("a", f"shape {list(a.shape)}", "[M, Kd] with Kd >= 1")
    if b.dim() != 2 or b.shape[0] == 0 or b.shape[1] != a.shape[1]:
        fail("b", f"shape {list(b.shape)}", f"[Nd, Kd={a.shape[1]}] with Nd >= 1")
    for argument, tensor, dtype in (("a", a, FP8), ("b", b, FP8), ("a_scale", a_scale, torch.float32), ("b_scale", b_scale, torch.float32)):
        expect_dtype(argument, tensor, (dtype,))
    pairs = _scale_shapes(a.shape[0], b.shape[0], a.shape[1])
    a_shape, b_shape = list(a_scale.shape), list(b_scale.shape)
    if a_shape not in [pair[0] for pair in pairs]:
        fail("a_scale", f"shape {a_shape}", " or ".join(str(pair[0]) for pair in pairs))
    if [a_shape, b_shape] not in pairs:
        fail("b_scale", f"shape {b_shape}", f"{' or '.join(str(b) for a, b in pairs if a == a_shape)}, beside a_scale {a_shape}")
    if out_dtype not in FLOATS[:3]:
        fail("out_dtype", out_dtype, ", ".join(map(str, FLOATS[:3])))


def _scale_shapes(num_rows: int, num_columns: int, depth: int) -> list[list[list[int]]]:
    """Shapes of a_scale and b_scale: row x row, group128 x block128, tensor x tensor."""
    groups = -(-depth // GROUP)
    return [[[num_rows, 1], [num_columns, 1]], [[num_rows, groups], [-(-num_columns // GROUP), groups]], [[1, 1], [1, 1]]]


def _sample(num_rows: int, num_columns: int, depth: int, granularity: str) -> Callable[[Draw, torch.dtype], Call]:
    """Stored values use fp8's range whatever range is drawn from, as quantised values do; scales lie around 1/448."""

    def stored(draw: Draw, *shape: int) -> Tensor:
        values = draw.values(shape, torch.bfloat16, scale=256 / RANGES[draw.value_range][1]).float()
        return to_fp8(values, torch.ones(()))

    def scale(draw: Draw, shape: list[int]) -> Tensor:
        return draw.integers(64, 192, shape) / 2.0**15

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        shapes = _scale_shapes(num_rows, num_columns, depth)[("row", "group128", "tensor").index(granularity)]
        return {
            "a": stored(draw, num_rows, depth),
            "b": stored(draw, num_columns, depth),
            "a_scale": scale(draw, shapes[0]),
            "b_scale": scale(draw, shapes[1]),
            "out_dtype": dtype,
        }

    return make


def _marked(draw: Draw, dtype: torch.dtype) -> Call:
    """A NaN in one row of a, as quantize_fp8 stores it, stays in that row of y."""
    call = _sample(7, 48, 300, "row")(draw, dtype)
    call["a"].view(torch.uint8)[2, 5] = 0x7F
    return call


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    shape = draw.integer(0, 70), draw.integer(16, 300), draw.integer(1, 520)
    return _sample(*shape, draw.choice(("row", "group128", "tensor")))(draw, dtype)


def _tolerances() -> dict[torch.dtype, Tolerance]:
    reason = "Hopper's tensor cores add fp8 products to 14 bits or so before they reach the fp32 sum: 2^-13 of each"
    return {**reduction_tolerances(), torch.float32: Tolerance(rule="rel_l2", limit=1e-3, worst_row=4e-3, reason=reason)}


SPEC = OpSpec(
    reference=gemm_fp8,
    fake=_fake,
    check=_check,
    outputs=("y",),
    tolerances={"y": _tolerances()},
    golden=_golden,
    samples=(
        Sample(name="row", make=_sample(7, 48, 300, "row")),
        Sample(name="group128", make=_sample(7, 300, 300, "group128")),
        Sample(name="tensor", make=_sample(7, 48, 300, "tensor")),
        Sample(name="row_empty", make=_sample(0, 48, 300, "row")),
        Sample(name="group128_empty", make=_sample(0, 48, 300, "group128")),
        Sample(name="tensor_empty", make=_sample(0, 48, 300, "tensor")),
        Sample(name="row_odd", make=_sample(13, 33, 65, "row")),
        Sample(name="group128_one_group", make=_sample(5, 130, 128, "group128")),
        Sample(name="group128_short_tail", make=_sample(3, 129, 257, "group128")),
        Sample(name="marked", make=_marked),
        Sample(name="one_row", make=_sample(1, 32, 256, "row")),
        Sample(name="one_column_each", make=_sample(5, 17, 1, "tensor")),
        Sample(name="one_output", make=_sample(1, 1, 64, "group128")),
        Sample(name="m3_expert_gate_up", tier="model", make=_sample(64, 6144, 6144, "group128")),
        Sample(name="m3_expert_down", tier="model", make=_sample(64, 6144, 3072, "row")),
        Sample(name="m3_dense_down", tier="model", make=_sample(16, 6144, 12288, "tensor")),
        Sample(name="m3_decode", tier="model", make=_sample(1, 6144, 3072, "group128")),
        Sample(name="long", tier="stress", make=_sample(4097, 1024, 3072, "group128")),
        Sample(name="deep", tier="stress", make=_sample(64, 256, 2**16, "row")),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="a of rank 3", argument="a", change=spoil(a=lambda a: a[None])),
        ErrorSample(name="a without columns", argument="a", change=spoil(a=lambda a: a[:, :0], b=lambda b: b[:, :0])),
        ErrorSample(name="a in bfloat16", argument="a", change=spoil(a=lambda a: a.bfloat16())),
        ErrorSample(name="a in fnuz", argument="a", change=spoil(a=lambda a: a.to(torch.float8_e4m3fnuz))),
        ErrorSample(name="b of another Kd", argument="b", change=spoil(b=lambda b: b[:, 1:])),
        ErrorSample(name="b without rows", argument="b", change=spoil(b=lambda b: b[:0])),
        ErrorSample(name="b in e5m2", argument="b", change=spoil(b=lambda b: b.to(torch.float8_e5m2))),
        ErrorSample(name="a_scale of rank 1", argument="a_scale", change=spoil(a_scale=lambda s: s[:, 0])),
        ErrorSample(name="a_scale of other rows", argument="a_scale", change=spoil(a_scale=lambda s: s[2:])),
        ErrorSample(name="a_scale in float64", argument="a_scale", change=spoil(a_scale=lambda s: s.double())),
        ErrorSample(name="a_scale as E8M0", argument="a_scale", change=spoil(a_scale=lambda s: s.to(torch.uint8))),
        ErrorSample(name="b_scale of a tensor beside rows", argument="b_scale", change=spoil(b_scale=lambda s: s[:1])),
        ErrorSample(name="b_scale transposed", argument="b_scale", change=spoil(b_scale=lambda s: s.T)),
        ErrorSample(name="b_scale in bfloat16", argument="b_scale", change=spoil(b_scale=lambda s: s.bfloat16())),
        ErrorSample(name="group128 beside rows", argument="b_scale", change=spoil(a_scale=lambda s: s.repeat(1, 3))),
        ErrorSample(name="out_dtype integer", argument="out_dtype", change=spoil(out_dtype=torch.int32)),
        ErrorSample(name="out_dtype fp8", argument="out_dtype", change=spoil(out_dtype=FP8)),
    ),
)

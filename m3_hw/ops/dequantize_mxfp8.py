"""Weights of the released MXFP8 checkpoint, as bfloat16."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FP8, expect_dtype, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, exact_tolerances, spoil

GROUP = 32
"""Values that share a scale."""


def dequantize_mxfp8(w: Tensor, scale: Tensor) -> Tensor:
    """Multiply each group of 32 values by its power of two.

    y[n, k] = w[n, k] * 2^(scale[n, k // 32] - 127), NaN where scale is 255

    Args:
        w: [Nd, Kd] fp8 e4m3fn, Kd a multiple of 32.
        scale: [Nd, Kd/32] uint8, E8M0: a biased exponent, without sign and mantissa.

    Returns:
        [Nd, Kd] bfloat16, fresh and contiguous.

    Raises:
        ContractError: Kd is no multiple of 32; scale is not [Nd, Kd/32]; a dtype differs.

    Numerics: Exact, except that values past bfloat16's range give inf (from scale 247 on) and that what its subnormals can't
        hold is rounded once, to nearest even (up to scale 2). Subnormals (up to scale 9) aren't flushed to zero. NaN stays NaN.

    Source: OCP Microscaling Formats (MX) 1.0, MXFP8 E4M3.
    """
    power = scale.view(torch.float8_e8m0fnu).to(torch.float32)  # [Nd, Kd/32]
    wide = w.to(torch.float32).reshape(*scale.shape, GROUP) * power[..., None]  # [Nd, Kd/32, 32]
    return wide.to(torch.bfloat16).view(w.shape)


def _fake(w: Tensor, scale: Tensor) -> Tensor:
    return torch.empty_like(w, dtype=torch.bfloat16, memory_format=torch.contiguous_format)


def _check(w: Tensor, scale: Tensor) -> None:
    if w.dim() != 2 or w.shape[1] == 0 or w.shape[1] % GROUP:
        fail("w", f"shape {list(w.shape)}", f"[Nd, Kd] with Kd a multiple of {GROUP}")
    expect_dtype("w", w, (FP8,))
    expect_shape("scale", scale, "Nd Kd/32", (w.shape[0], w.shape[1] // GROUP))
    expect_dtype("scale", scale, (torch.uint8,))


def _sample(num_rows: int, num_groups: int, *, low: int = 110, high: int = 140, nan: bool = True) -> Callable[[Draw, torch.dtype], Call]:
    """Any fp8 bits, with or without NaN; scales of `low` to `high` - 1."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        bits = draw.integers(0, 256, (num_rows, num_groups * GROUP)).to(torch.uint8)
        if not nan:
            bits = torch.where(bits & 0x7F == 0x7F, bits - 1, bits)
        return {"w": bits.view(FP8), "scale": draw.integers(low, high, (num_rows, num_groups)).to(torch.uint8)}

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    low = draw.integer(0, 256)
    return _sample(draw.integer(0, 80), draw.integer(1, 12), low=low, high=draw.integer(low, 256) + 1)(draw, dtype)


SPEC = OpSpec(
    reference=dequantize_mxfp8,
    fake=_fake,
    check=_check,
    outputs=("y",),
    tolerances={"y": exact_tolerances("a product with a power of two, which bfloat16 holds, rounded only outside its range")},
    dtypes=(torch.bfloat16,),
    token_axes={"w": 0, "scale": 0, "y": 0},
    samples=(
        Sample(name="rows", make=_sample(5, 3, nan=False)),
        Sample(name="nan_weights", make=_sample(5, 3)),
        Sample(name="one_group", make=_sample(1, 1)),
        Sample(name="odd", make=_sample(13, 7)),
        Sample(name="empty", make=_sample(0, 3)),
        Sample(name="every_scale", make=_sample(64, 8, low=0, high=256)),
        Sample(name="overflow", make=_sample(9, 4, low=240, high=255)),
        Sample(name="subnormal", make=_sample(9, 4, low=0, high=16)),
        Sample(name="nan_scales", make=_sample(4, 3, low=255, high=256)),
        Sample(name="m3_expert_gate_up", tier="model", make=_sample(6144, 192)),
        Sample(name="m3_expert_down", tier="model", make=_sample(6144, 96)),
        Sample(name="m3_dense_down", tier="model", make=_sample(768, 384)),
        Sample(name="long", tier="stress", make=_sample(16385, 96, low=0, high=256)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="w of rank 3", argument="w", change=spoil(w=lambda w: w[None])),
        ErrorSample(name="w of 95 columns", argument="w", change=spoil(w=lambda w: w[:, 1:])),
        ErrorSample(name="w without columns", argument="w", change=spoil(w=lambda w: w[:, :0], scale=lambda s: s[:, :0])),
        ErrorSample(name="w in uint8", argument="w", change=spoil(w=lambda w: w.view(torch.uint8))),
        ErrorSample(name="w in fnuz", argument="w", change=spoil(w=lambda w: w.view(torch.float8_e4m3fnuz))),
        ErrorSample(name="w in e5m2", argument="w", change=spoil(w=lambda w: w.view(torch.float8_e5m2))),
        ErrorSample(name="scale of other rows", argument="scale", change=spoil(scale=lambda s: s[1:])),
        ErrorSample(name="scale of fewer groups", argument="scale", change=spoil(scale=lambda s: s[:, 1:])),
        ErrorSample(name="scale transposed", argument="scale", change=spoil(scale=lambda s: s.T)),
        ErrorSample(name="scale in float32", argument="scale", change=spoil(scale=lambda s: s.float())),
        ErrorSample(name="scale in int32", argument="scale", change=spoil(scale=lambda s: s.int())),
    ),
)

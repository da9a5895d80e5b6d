"""RMSNorm, Gemma style."""

from typing import Any

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_positive, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, elementwise_tolerances, spoil


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Normalise by the root mean square, Gemma style.

    y = x * rsqrt(mean(x^2) + eps) * (1 + weight)

    Args:
        x: [..., H], floating.
        weight: [H], floating; its dtype may differ from x's.
        eps: Added to the mean square; M3 has 1e-6.

    Returns:
        [..., H] in x's dtype, fresh and contiguous.

    Raises:
        ContractError: weight is not [H]; a dtype is not floating; eps is not above 0.

    Numerics: All in fp32, 1 + weight included; one rounding, at the end. Zero rows give zeros.

    Source: transformers `MiniMaxM3VLRMSNorm`.
    """
    acc = accumulate_dtype(x.dtype)
    wide = x.to(acc)
    inverse_rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)  # [..., 1]
    return (wide * inverse_rms * (1 + weight.to(acc))).to(x.dtype).contiguous()


def _fake(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_norm(x: Tensor, weight: Tensor, eps: float) -> None:
    """What the norms share: x [..., H], weight [H], eps > 0."""
    shape = x.shape
    if not shape or not shape[-1]:
        fail("x", f"shape {list(shape)}", "[..., H] with H >= 1")
    expect_dtype("x", x, FLOATS)
    expect_shape("weight", weight, "H", shape[-1:])
    expect_dtype("weight", weight, FLOATS)
    expect_positive("eps", eps)


def _sample(*shape: int, weight_dtype: torch.dtype | None = None, size: float = 1.0) -> Any:
    """Small values meet eps; 1 + a small weight in bf16 needs more bits than bf16 has."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        weight = draw.values(shape[-1:], weight_dtype or dtype, scale=max(size, 2.0**-5))
        return {"x": draw.values(shape, dtype, scale=4 * size), "weight": weight, "eps": 1e-6}

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    shape = [draw.integer(1, 40) for _ in range(draw.integer(0, 3))] + [draw.integer(1, 300)]
    return {"x": draw.values(shape, dtype, scale=4), "weight": draw.values(shape[-1:], dtype), "eps": draw.choice((1e-6, 1e-5))}


NORM_ERRORS = (
    ErrorSample(name="integer x", argument="x", change=spoil(x=lambda x: x.int())),
    ErrorSample(name="scalar x", argument="x", change=spoil(x=lambda x: x.flatten()[0])),
    ErrorSample(name="weight too short", argument="weight", change=spoil(weight=lambda w: w[1:])),
    ErrorSample(name="weight of rank 2", argument="weight", change=spoil(weight=lambda w: w[None])),
    ErrorSample(name="integer weight", argument="weight", change=spoil(weight=lambda w: w.int())),
    ErrorSample(name="eps that fp32 doesn't hold", argument="eps", change=spoil(eps=1e-50)),
    ErrorSample(name="eps zero", argument="eps", change=spoil(eps=0.0)),
    ErrorSample(name="eps NaN", argument="eps", change=spoil(eps=float("nan"))),
)
"""Malformed calls that every norm must refuse."""

SPEC = OpSpec(
    reference=rms_norm,
    fake=_fake,
    check=check_norm,
    outputs=("y",),
    tolerances={"y": elementwise_tolerances()},
    token_axes={"x": 0, "y": 0},
    samples=(
        Sample(name="rows", make=_sample(5, 96)),
        Sample(name="odd", make=_sample(3, 7, 33)),
        Sample(name="one_axis", make=_sample(17)),
        Sample(name="empty", make=_sample(0, 96)),
        Sample(name="fp32_weight", make=_sample(4, 64, weight_dtype=torch.float32)),
        Sample(name="bf16_weight", make=_sample(4, 64, weight_dtype=torch.bfloat16, size=2.0**-5)),
        Sample(name="faint", make=_sample(5, 96, size=2.0**-12)),
        Sample(name="hidden", tier="model", make=_sample(256, 6144)),
        Sample(name="long", tier="stress", make=_sample(8191, 6144)),
    ),
    random_sample=_random_sample,
    error_samples=NORM_ERRORS,
)

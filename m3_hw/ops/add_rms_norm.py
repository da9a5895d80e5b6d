"""The residual stream's addition and the norm that follows it."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import expect_dtype, expect_shape
from m3_hw.draw import Draw
from m3_hw.ops.rms_norm import NORM_ERRORS, check_norm, rms_norm
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, elementwise_tolerances, exact_tolerances, spoil


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Add to the residual stream, and normalise the sum, Gemma style.

    new_residual = round(x + residual); y = new_residual * rsqrt(mean(new_residual^2) + eps) * (1 + weight)

    Args:
        x: [..., H], floating: what a layer gave.
        residual: [..., H], in x's shape and dtype.
        weight: [H], floating; its dtype may differ from x's.
        eps: Added to the mean square; M3 has 1e-6.

    Returns:
        y: [..., H] in x's dtype, fresh and contiguous.
        new_residual: [..., H] in x's dtype, fresh and contiguous: residual itself is not written.

    Raises:
        ContractError: residual is not like x; weight is not [H]; a dtype is not floating; eps is not above 0.

    Numerics: The sum is rounded to x's dtype once, and the norm is of the rounded sum. All else as in `rms_norm`.

    Source: transformers `MiniMaxM3VLDecoderLayer`, which adds in the dtype of the hidden states, and `MiniMaxM3VLRMSNorm`.
    """
    new_residual = (x + residual).contiguous()
    return rms_norm(new_residual, weight, eps), new_residual


def _golden(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """The norm in fp64, but of the sum as it is stored."""
    new_residual = (x.double() + residual.double()).to(x.dtype)
    return rms_norm(new_residual.double(), weight.double(), eps), new_residual


def _fake(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), torch.empty_like(x, memory_format=torch.contiguous_format)


def _check(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    check_norm(x, weight, eps)
    expect_shape("residual", residual, " ".join(f"x.shape[{i}]" for i in range(x.dim())), x.shape)
    expect_dtype("residual", residual, (x.dtype,))


def _sample(
    *shape: int, weight_dtype: torch.dtype | None = None, spread: float = 1, size: float = 1
) -> Callable[[Draw, torch.dtype], Call]:
    """`spread` is how much larger the residual stream is than what is added to it, `size` how large both and the weight are."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {
            "x": draw.values(shape, dtype, scale=4 * size),
            "residual": draw.values(shape, dtype, scale=4 * spread * size),
            "weight": draw.values(shape[-1:], weight_dtype or dtype, scale=max(size, 2.0**-5)),
            "eps": 1e-6,
        }

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    shape = [draw.integer(1, 40) for _ in range(draw.integer(0, 3))] + [draw.integer(1, 300)]
    return {**_sample(*shape, spread=draw.choice((1, 0.125, 8)))(draw, dtype), "eps": draw.choice((1e-6, 1e-5))}


SPEC = OpSpec(
    reference=add_rms_norm,
    fake=_fake,
    check=_check,
    outputs=("y", "new_residual"),
    tolerances={
        "y": elementwise_tolerances(),
        "new_residual": exact_tolerances("a sum of two values: fp32 holds enough bits that rounding it again changes nothing"),
    },
    golden=_golden,
    token_axes={"x": 0, "residual": 0, "y": 0, "new_residual": 0},
    samples=(
        Sample(name="rows", make=_sample(5, 96)),
        Sample(name="odd", make=_sample(3, 7, 33)),
        Sample(name="one_axis", make=_sample(17)),
        Sample(name="one_channel", make=_sample(6, 1)),
        Sample(name="empty", make=_sample(0, 96)),
        Sample(name="fp32_weight", make=_sample(4, 64, weight_dtype=torch.float32)),
        Sample(name="large_residual", make=_sample(5, 130, spread=64)),
        Sample(name="bf16_weight", make=_sample(4, 64, weight_dtype=torch.bfloat16, size=2.0**-5)),
        Sample(name="faint", make=_sample(5, 96, size=2.0**-12)),
        Sample(name="hidden", tier="model", make=_sample(256, 6144)),
        Sample(name="decode", tier="model", make=_sample(1, 6144, spread=8)),
        Sample(name="long", tier="stress", make=_sample(8191, 6144)),
    ),
    random_sample=_random_sample,
    error_samples=(
        *NORM_ERRORS,
        ErrorSample(name="residual of rank 1", argument="residual", change=spoil(residual=lambda r: r[0])),
        ErrorSample(name="residual of other tokens", argument="residual", change=spoil(residual=lambda r: r[1:])),
        ErrorSample(name="residual that broadcasts", argument="residual", change=spoil(residual=lambda r: r[:1])),
        ErrorSample(name="residual in float64", argument="residual", change=spoil(residual=lambda r: r.double())),
    ),
)

"""The per-head norm and the rope of queries and keys, in one pass."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import expect_rank
from m3_hw.draw import Draw
from m3_hw.ops.rms_norm import NORM_ERRORS, check_norm, rms_norm
from m3_hw.ops.rope import ROPE_ERRORS, check_rope, draw_tables, random_shape, rope
from m3_hw.spec import Call, OpSpec, Sample, accumulate_dtype, elementwise_tolerances


def qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    """Normalise every head by its own root mean square, Gemma style, and rotate its first R channels.

    y = rope(rms_norm(x, weight, eps), cos, sin), rounded once

    Args:
        x: [T, n, D], floating: queries, keys, index queries or index keys.
        weight: [D], floating, the same for every head; its dtype may differ from x's.
        cos, sin: [T, R/2] float32 (float64 with float64 x), R <= D.
        eps: Added to the mean square; M3 has 1e-6.

    Returns:
        [T, n, D] in x's dtype, fresh and contiguous. Channels R.. are normalised but not rotated.

    Raises:
        ContractError: A shape or dtype differs, as in `rms_norm` and `rope`; eps is not above 0.

    Numerics: All in fp32; nothing is rounded between norm and rope; one rounding, at the end.

    Source: transformers `MiniMaxM3VLAttention`, which rounds between the two.
    """
    normed = rms_norm(x.to(accumulate_dtype(x.dtype)), weight, eps)  # [T, n, D]
    return rope(normed, cos, sin).to(x.dtype)


def _fake(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> None:
    expect_rank("x", x, "T n D")
    check_norm(x, weight, eps)
    check_rope(x, cos, sin)


def _sample(
    num_tokens: int, num_heads: int, dim: int, num_rotary: int, *, weight_dtype: torch.dtype | None = None, size: float = 1.0
) -> Callable[[Draw, torch.dtype], Call]:
    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {
            "x": draw.values((num_tokens, num_heads, dim), dtype, scale=4 * size),
            "weight": draw.values((dim,), weight_dtype or dtype, scale=max(size, 2.0**-5)),
            **draw_tables(draw, num_tokens, num_rotary, dtype),
            "eps": 1e-6,
        }

    return make


SPEC = OpSpec(
    reference=qk_norm_rope,
    fake=_fake,
    check=_check,
    outputs=("y",),
    tolerances={"y": elementwise_tolerances()},
    token_axes={"x": 0, "cos": 0, "sin": 0, "y": 0},
    samples=(
        Sample(name="rows", make=_sample(5, 4, 32, 16)),
        Sample(name="every_channel", make=_sample(3, 2, 48, 48)),
        Sample(name="one_pair", make=_sample(3, 5, 9, 2)),
        Sample(name="odd", make=_sample(7, 3, 37, 22)),
        Sample(name="one_token", make=_sample(1, 1, 17, 10)),
        Sample(name="as_many_tokens_as_heads", make=_sample(4, 4, 24, 16)),
        Sample(name="empty", make=_sample(0, 4, 32, 16)),
        Sample(name="fp32_weight", make=_sample(4, 2, 32, 16, weight_dtype=torch.float32)),
        Sample(name="bf16_weight", make=_sample(4, 2, 32, 16, weight_dtype=torch.bfloat16, size=2.0**-5)),
        Sample(name="faint", make=_sample(4, 2, 32, 16, size=2.0**-12)),
        Sample(name="m3_heads", make=_sample(65, 33, 128, 64)),
        Sample(name="m3_q", tier="model", make=_sample(256, 64, 128, 64)),
        Sample(name="m3_k", tier="model", make=_sample(256, 4, 128, 64)),
        Sample(name="m3_index_k", tier="model", make=_sample(256, 1, 128, 64)),
        Sample(name="m3_decode", tier="model", make=_sample(1, 64, 128, 64)),
        Sample(name="long", tier="stress", make=_sample(8193, 64, 128, 64)),
    ),
    random_sample=lambda draw, dtype: _sample(*random_shape(draw))(draw, dtype),
    error_samples=(*NORM_ERRORS, *ROPE_ERRORS),
)

"""Rotary position embedding on the first channels of every head."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_rank, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, elementwise_tolerances, spoil


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first R channels of every head, pairing channel i with i + R/2.

    y[t, n, i]       = x[t, n, i] * cos[t, i] - x[t, n, i + R/2] * sin[t, i]
    y[t, n, i + R/2] = x[t, n, i + R/2] * cos[t, i] + x[t, n, i] * sin[t, i]

    Args:
        x: [T, n, D], floating.
        cos, sin: [T, R/2] float32 (float64 with float64 x), R <= D: made once per step, on the host, so that every backend
            sees the same bits. M3 has R = 64 of 128 in text, 78 of 80 in vision.

    Returns:
        [T, n, D] in x's dtype, fresh and contiguous. Channels R.. are x's, bit for bit.

    Raises:
        ContractError: x is not [T, n, D]; cos and sin are not [T, R/2] with 2 <= R <= D; a dtype differs.

    Numerics: fp32 products and sums, one rounding, at the end.

    Source: transformers `apply_rotary_pos_emb` and `apply_rotary_pos_emb_vision` of minimax_m3_vl.
    """
    num_rotary = 2 * cos.shape[1]
    rotated = rotate(x[..., :num_rotary].to(accumulate_dtype(x.dtype)), cos, sin)
    return torch.cat([rotated.to(x.dtype), x[..., num_rotary:]], dim=-1)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All channels of x [T, n, R] by cos and sin [T, R/2], in x's dtype."""
    first, second = x.chunk(2, dim=-1)  # [T, n, R/2]
    cos, sin = cos[:, None], sin[:, None]  # [T, 1, R/2]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


def _fake(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def check_rope(x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """What rope and qk_norm_rope share: x [T, n, D], cos and sin [T, R/2]."""
    expect_rank("x", x, "T n D")
    expect_dtype("x", x, FLOATS)
    expect_shape("cos", cos, "T R/2", (x.shape[0], -1))
    if not 2 <= 2 * cos.shape[1] <= x.shape[2]:
        fail("cos", f"shape {list(cos.shape)}", f"[T, R/2] with 2 <= R <= D={x.shape[2]}")
    expect_shape("sin", sin, "T R/2", cos.shape)
    for argument, table in (("cos", cos), ("sin", sin)):
        expect_dtype(argument, table, (accumulate_dtype(x.dtype),))


def draw_tables(draw: Draw, num_tokens: int, num_rotary: int, dtype: torch.dtype) -> dict[str, Tensor]:
    """cos and sin of drawn angles, as rational points of the circle: divisions round alike everywhere, `cos()` doesn't."""
    tangent = draw.values((num_tokens, num_rotary // 2), torch.float64, scale=4)  # of half the angle
    norm = 1 + tangent.square()
    acc = accumulate_dtype(dtype)
    return {"cos": ((1 - tangent.square()) / norm).to(acc), "sin": (2 * tangent / norm).to(acc)}


def _sample(num_tokens: int, num_heads: int, dim: int, num_rotary: int) -> Callable[[Draw, torch.dtype], Call]:
    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {"x": draw.values((num_tokens, num_heads, dim), dtype, scale=4), **draw_tables(draw, num_tokens, num_rotary, dtype)}

    return make


def random_shape(draw: Draw) -> tuple[int, int, int, int]:
    """T, n, D and R of a random case."""
    dim = draw.integer(2, 150)
    return draw.integer(0, 40), draw.integer(1, 9), dim, 2 * draw.integer(1, dim // 2 + 1)


ROPE_ERRORS = (
    ErrorSample(name="x of rank 2", argument="x", change=spoil(x=lambda x: x[:, 0])),
    ErrorSample(name="cos of rank 3", argument="cos", change=spoil(cos=lambda c: c[:, None])),
    ErrorSample(name="cos of other tokens", argument="cos", change=spoil(cos=lambda c: c[1:])),
    ErrorSample(name="cos without channels", argument="cos", change=spoil(cos=lambda c: c[:, :0], sin=lambda s: s[:, :0])),
    ErrorSample(name="cos for every channel", argument="cos", change=spoil(cos=lambda c: c.repeat(1, 99), sin=lambda s: s.repeat(1, 99))),
    ErrorSample(name="cos in float16", argument="cos", change=spoil(cos=lambda c: c.half())),
    ErrorSample(name="sin of fewer channels", argument="sin", change=spoil(sin=lambda s: s[:, 1:])),
    ErrorSample(name="sin of other tokens", argument="sin", change=spoil(sin=lambda s: s[1:])),
    ErrorSample(name="sin in float16", argument="sin", change=spoil(sin=lambda s: s.half())),
)
"""Malformed calls that rope and qk_norm_rope must refuse."""

SPEC = OpSpec(
    reference=rope,
    fake=_fake,
    check=check_rope,
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
        Sample(name="vision_head", make=_sample(6, 2, 80, 78)),
        Sample(name="m3_heads", make=_sample(65, 33, 128, 64)),
        Sample(name="m3_q", tier="model", make=_sample(256, 64, 128, 64)),
        Sample(name="m3_k", tier="model", make=_sample(256, 4, 128, 64)),
        Sample(name="m3_index_k", tier="model", make=_sample(256, 1, 128, 64)),
        Sample(name="m3_vision", tier="model", make=_sample(1024, 16, 80, 78)),
        Sample(name="m3_decode", tier="model", make=_sample(1, 64, 128, 64)),
        Sample(name="long", tier="stress", make=_sample(8193, 68, 128, 64)),
    ),
    random_sample=lambda draw, dtype: _sample(*random_shape(draw))(draw, dtype),
    error_samples=(*ROPE_ERRORS, ErrorSample(name="integer x", argument="x", change=spoil(x=lambda x: x.int()))),
)

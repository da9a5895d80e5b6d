"""SwiGLU as gpt-oss and MiniMax-M3 have it: clamped, with a slope inside the sigmoid and 1 added to up."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_finite, expect_positive, expect_rank, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, elementwise_tolerances, spoil


def swiglu_oai(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    """Gate the second half of each row by the first.

    y = (up + 1) * gate * sigmoid(alpha * gate) with gate = min(gate, limit) and up = clamp(up, -limit, limit)

    Args:
        gate_up: [T, 2*I], floating; gate first, up second, not interleaved.
        alpha: Slope inside the sigmoid, finite; M3 has 1.702.
        limit: Clamp of gate from above and of up from both sides, finite and above 0; M3 has 7.0.

    Returns:
        [T, I] in gate_up's dtype, fresh and contiguous.

    Raises:
        ContractError: gate_up is not [T, 2*I]; its dtype is not floating; alpha is not finite; limit is not finite and above 0.

    Numerics: All in fp32, one rounding, at the end. NaN stays NaN.

    Source: transformers `MiniMaxM3VLDenseMLP` and `MiniMaxM3VLExperts`.
    """
    gate, up = gate_up.to(accumulate_dtype(gate_up.dtype)).chunk(2, dim=-1)  # [T, I]
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return ((up + 1) * gate * torch.sigmoid(alpha * gate)).to(gate_up.dtype)


def _fake(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    return gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))


def _check(gate_up: Tensor, alpha: float, limit: float) -> None:
    expect_rank("gate_up", gate_up, "T 2*I")
    if gate_up.shape[1] == 0 or gate_up.shape[1] % 2:
        fail("gate_up", f"shape {list(gate_up.shape)}", "[T, 2*I] with I >= 1")
    expect_dtype("gate_up", gate_up, FLOATS)
    expect_finite("alpha", alpha)
    expect_positive("limit", limit)


def _sample(num_tokens: int, width: int, *, alpha: float = 1.702, limit: float = 7.0) -> Callable[[Draw, torch.dtype], Call]:
    """Values to twice M3's limit: a share of both halves is clamped."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {"gate_up": draw.values((num_tokens, 2 * width), dtype, scale=16), "alpha": alpha, "limit": limit}

    return make


def _special(draw: Draw, dtype: torch.dtype) -> Call:
    """NaN and infinities in both halves: NaN stays NaN, infinities are clamped where there is a clamp."""
    call = _sample(6, 48)(draw, dtype)
    for row, value in enumerate((torch.nan, torch.inf, -torch.inf)):
        call["gate_up"][row, 0] = call["gate_up"][row + 3, 48] = value
    return call


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    make = _sample(draw.integer(0, 50), draw.integer(1, 300), alpha=draw.choice((1.702, 1.0, 0.5)), limit=draw.choice((7.0, 1.0, 30.0)))
    return make(draw, dtype)


SPEC = OpSpec(
    reference=swiglu_oai,
    fake=_fake,
    check=_check,
    outputs=("y",),
    tolerances={"y": elementwise_tolerances()},
    token_axes={"gate_up": 0, "y": 0},
    samples=(
        Sample(name="rows", make=_sample(5, 96)),
        Sample(name="odd", make=_sample(7, 33)),
        Sample(name="one_channel", make=_sample(3, 1)),
        Sample(name="one_token", make=_sample(1, 130)),
        Sample(name="empty", make=_sample(0, 96)),
        Sample(name="tight_limit", make=_sample(6, 48, limit=0.5)),
        Sample(name="wide_limit", make=_sample(6, 48, limit=100.0)),
        Sample(name="no_slope", make=_sample(4, 17, alpha=0.0)),
        Sample(name="negative_slope", make=_sample(4, 17, alpha=-1.0)),
        Sample(name="special_values", make=_special),
        Sample(name="expert", tier="model", make=_sample(512, 3072)),
        Sample(name="dense_mlp", tier="model", make=_sample(128, 12288)),
        Sample(name="decode", tier="model", make=_sample(1, 12288)),
        Sample(name="long", tier="stress", make=_sample(16385, 3072)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="gate_up of rank 1", argument="gate_up", change=spoil(gate_up=lambda x: x[0])),
        ErrorSample(name="gate_up of rank 3", argument="gate_up", change=spoil(gate_up=lambda x: x[None])),
        ErrorSample(name="gate_up of odd width", argument="gate_up", change=spoil(gate_up=lambda x: x[:, 1:])),
        ErrorSample(name="gate_up without channels", argument="gate_up", change=spoil(gate_up=lambda x: x[:, :0])),
        ErrorSample(name="integer gate_up", argument="gate_up", change=spoil(gate_up=lambda x: x.int())),
        ErrorSample(name="alpha NaN", argument="alpha", change=spoil(alpha=float("nan"))),
        ErrorSample(name="alpha infinite", argument="alpha", change=spoil(alpha=float("inf"))),
        ErrorSample(name="limit zero", argument="limit", change=spoil(limit=0.0)),
        ErrorSample(name="limit negative", argument="limit", change=spoil(limit=-7.0)),
        ErrorSample(name="limit that fp32 doesn't hold", argument="limit", change=spoil(limit=1e39)),
        ErrorSample(name="limit infinite", argument="limit", change=spoil(limit=float("inf"))),
        ErrorSample(name="limit NaN", argument="limit", change=spoil(limit=float("nan"))),
    ),
)

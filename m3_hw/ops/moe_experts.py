"""The routed experts of an MoE layer."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import expect_dtype, expect_finite, expect_positive, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.ops.grouped_gemm import draw_weight, grouped_gemm
from m3_hw.ops.permute_tokens import Ids, check_tokens, distinct_ids, ids_among, permute_tokens, stray_ids, unowned_tokens
from m3_hw.ops.swiglu_oai import swiglu_oai
from m3_hw.ops.unpermute_tokens import check_weights, draw_weights, unpermute_tokens
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, reduction_tolerances, spoil


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, *, alpha: float, limit: float) -> Tensor:
    """Run each token through its experts and sum what they give.

    y[t] = sum over a of weights[t, a] * w_down[e] swiglu_oai(w_gate_up[e] x[t]) where e = ids[t, a]

    The routed scale is already inside the weights, put there by `route_tokens`, and is not applied again. The shared expert is
    outside: the caller adds its output, or appends it to the weights as one more expert whose weight is 1. Ids outside
    0 to E-1 add nothing: the ranks of an expert-parallel group sum up to the whole layer.

    Args:
        x: [T, H], floating. Tokens without an expert here are not read.
        weights: [T, A] float32 (float64 with float64 x). Those of ids outside 0 to E-1 are not read.
        ids: [T, A] int32, any values, repeats included.
        w_gate_up: [E, 2*I, H] in x's dtype; gate first, up second, not interleaved.
        w_down: [E, H, I] in x's dtype.
        alpha: Slope inside the sigmoid, finite; M3 has 1.702.
        limit: Clamp of gate and up, finite and above 0; M3 has 7.0.

    Returns:
        [T, H] in x's dtype, fresh and contiguous.

    Raises:
        ContractError: A shape or dtype differs; alpha is not finite; limit is not finite and above 0.

    Numerics: fp32 throughout, summed in the order of the slots; one rounding, at the end. A backend may also round what goes
        from one stage to the next to x's dtype.

    Source: transformers `MiniMaxM3VLExperts`.
    """
    acc = accumulate_dtype(x.dtype)
    rows, source, offsets = permute_tokens(x.to(acc), ids, w_gate_up.shape[0])  # [T*A, H]
    hidden = swiglu_oai(grouped_gemm(rows, w_gate_up, offsets), alpha, limit)  # [T*A, I]
    return unpermute_tokens(grouped_gemm(hidden, w_down, offsets), source, weights).to(x.dtype)


def _fake(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, *, alpha: float, limit: float) -> Tensor:
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _check(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, *, alpha: float, limit: float) -> None:
    check_tokens(x, ids)
    expect_shape("weights", weights, "T A", ids.shape)
    check_weights(weights, x.dtype)
    shape = w_gate_up.shape
    if len(shape) != 3 or shape[2] != x.shape[1] or shape[1] % 2 or 0 in shape:
        fail("w_gate_up", f"shape {list(shape)}", f"[E, 2*I, H={x.shape[1]}] with every axis >= 1")
    expect_dtype("w_gate_up", w_gate_up, (x.dtype,))
    expect_shape("w_down", w_down, "E H I", (shape[0], shape[2], shape[1] // 2))
    expect_dtype("w_down", w_down, (x.dtype,))
    expect_finite("alpha", alpha)
    expect_positive("limit", limit)


def _unowned(call: Call) -> dict[str, Tensor]:
    ids, num_experts = call["ids"], call["w_gate_up"].shape[0]
    return {"x": unowned_tokens(ids, num_experts, call["x"]), "weights": (ids < 0) | (ids >= num_experts)}


def _sample(
    num_tokens: int, hidden: int, width: int, top_k: int, num_experts: int, make_ids: Ids = distinct_ids
) -> Callable[[Draw, torch.dtype], Call]:
    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {
            "x": draw.values((num_tokens, hidden), dtype, scale=4),
            "weights": draw_weights(draw, num_tokens, top_k, dtype),
            "ids": make_ids(draw, num_tokens, top_k, num_experts),
            "w_gate_up": draw_weight(draw, (num_experts, 2 * width, hidden), dtype),
            "w_down": draw_weight(draw, (num_experts, hidden, width), dtype),
            "alpha": 1.702,
            "limit": 7.0,
        }

    return make


def _large_gates(draw: Draw, dtype: torch.dtype) -> Call:
    """Gates of -76800, which fp16 doesn't hold: SwiGLU takes them before they are rounded, or its result is NaN."""
    call = _sample(5, 128, 80, 2, 3)(draw, dtype)
    call["x"][1] = 100
    call["w_gate_up"][:, 0], call["w_gate_up"][:, 1:80] = 2.0**-7, -6
    return call


def _overflow(draw: Draw, dtype: torch.dtype) -> Call:
    """Gates and ups beyond fp32's range become infinite and are clamped: no NaN."""
    call = _sample(6, 32, 72, 3, 8)(draw, dtype)
    return {**call, "x": torch.full_like(call["x"], 3e38), "w_gate_up": call["w_gate_up"].abs()}


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    num_experts = draw.integer(1, 13)
    top_k = draw.integer(1, min(num_experts, 8) + 1)
    make_ids = draw.choice((distinct_ids, stray_ids))
    # 16 channels at least: where every gate of a token is far below 0, nothing is left to compare in fp16.
    hidden, width = draw.integer(16, 100), draw.integer(16, 140)
    call = _sample(draw.integer(0, 40), hidden, width, top_k, num_experts, make_ids)(draw, dtype)
    return {**call, "alpha": draw.choice((1.702, 1.0)), "limit": draw.choice((7.0, 1.0))}


SPEC = OpSpec(
    reference=moe_experts,
    fake=_fake,
    check=_check,
    outputs=("y",),
    tolerances={"y": reduction_tolerances()},
    token_axes={"x": 0, "weights": 0, "ids": 0, "y": 0},
    unowned=_unowned,
    samples=(
        Sample(name="rows", make=_sample(6, 32, 24, 3, 8)),
        Sample(name="empty", make=_sample(0, 32, 24, 3, 8)),
        Sample(name="one_token", make=_sample(1, 17, 9, 2, 3)),
        Sample(name="odd", make=_sample(13, 65, 33, 5, 7)),
        Sample(name="one_slot", make=_sample(9, 32, 24, 1, 5)),
        Sample(name="wide_expert", make=_sample(7, 40, 72, 2, 3)),
        Sample(name="large_gates", make=_large_gates),
        Sample(name="overflow", make=_overflow, dtypes=(torch.float32, torch.bfloat16)),
        Sample(name="stray_ids", make=_sample(9, 32, 16, 4, 6, stray_ids)),
        Sample(name="all_dropped", make=_sample(5, 32, 16, 2, 4, ids_among(-1, 4, 1 << 30))),
        Sample(name="inner_experts", make=_sample(8, 32, 16, 2, 8, ids_among(2, 3, 6))),
        Sample(name="last_expert", make=_sample(8, 32, 16, 2, 8, ids_among(7))),
        Sample(
            name="m3_rank",
            tier="model",
            make=_sample(16, 6144, 3072, 4, 2, stray_ids),
            note="2 of the 128 experts: one rank of 64",
        ),
        Sample(name="m3_experts", tier="model", make=_sample(256, 384, 192, 4, 128), note="all 128 experts at 1/16 of the widths"),
        Sample(name="many_tokens", tier="stress", make=_sample(8193, 129, 65, 8, 33, stray_ids)),
        Sample(name="many_experts", tier="stress", make=_sample(257, 96, 48, 8, 513)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="x of rank 3", argument="x", change=spoil(x=lambda x: x[None])),
        ErrorSample(name="integer x", argument="x", change=spoil(x=lambda x: x.int())),
        ErrorSample(name="ids of other tokens", argument="ids", change=spoil(ids=lambda i: i[1:])),
        ErrorSample(name="ids without slots", argument="ids", change=spoil(ids=lambda i: i[:, :0], weights=lambda w: w[:, :0])),
        ErrorSample(name="ids in int64", argument="ids", change=spoil(ids=lambda i: i.long())),
        ErrorSample(name="weights of fewer slots", argument="weights", change=spoil(weights=lambda w: w[:, 1:])),
        ErrorSample(name="weights in float16", argument="weights", change=spoil(weights=lambda w: w.half())),
        ErrorSample(name="w_gate_up of one expert", argument="w_gate_up", change=spoil(w_gate_up=lambda w: w[0])),
        ErrorSample(name="w_gate_up of odd width", argument="w_gate_up", change=spoil(w_gate_up=lambda w: w[:, 1:])),
        ErrorSample(name="w_gate_up of another H", argument="w_gate_up", change=spoil(w_gate_up=lambda w: w[:, :, 1:])),
        ErrorSample(name="w_gate_up without experts", argument="w_gate_up", change=spoil(w_gate_up=lambda w: w[:0])),
        ErrorSample(name="w_gate_up in float64", argument="w_gate_up", change=spoil(w_gate_up=lambda w: w.double())),
        ErrorSample(name="w_down of fewer experts", argument="w_down", change=spoil(w_down=lambda w: w[1:])),
        ErrorSample(name="w_down not transposed", argument="w_down", change=spoil(w_down=lambda w: w.mT)),
        ErrorSample(name="w_down in float64", argument="w_down", change=spoil(w_down=lambda w: w.double())),
        ErrorSample(name="alpha infinite", argument="alpha", change=spoil(alpha=float("inf"))),
        ErrorSample(name="limit zero", argument="limit", change=spoil(limit=0.0)),
        ErrorSample(name="limit negative", argument="limit", change=spoil(limit=-7.0)),
        ErrorSample(name="limit NaN", argument="limit", change=spoil(limit=float("nan"))),
    ),
)

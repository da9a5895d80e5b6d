"""Attention within each sequence of a packed batch, not causal, without a cache: the vision tower."""

from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from m3_hw.contract import (
    FLOATS,
    expect_at_least,
    expect_dtype,
    expect_positive,
    expect_prefix_sums,
    expect_rank,
    expect_shape,
    expect_sizes,
    fail,
)
from m3_hw.draw import Draw
from m3_hw.paged import attend
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, reduction_tolerances, spoil


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, max_seqlen: int, deterministic: bool = False
) -> Tensor:
    """Softmax attention of every token over all tokens of its own sequence.

    out[t, h] = softmax(scale * q[t, h] . K) V over the tokens of t's sequence

    Args:
        q, k, v: [T, n, D] packed tokens of one dtype; M3's vision tower has 16 heads of 80.
        cu_seqlens: [B+1] int32, prefix sums of the sequences' lengths. Rows past the last are padding.
        scale: Factor on the scores, usually D ** -0.5.
        max_seqlen: At least the longest sequence's length (a host size, for the launch).
        deterministic: Same bits for a sequence whatever else is in the batch.

    Returns:
        [T, n, D] in q's dtype, fresh. Padding rows give zeros.

    Raises:
        ContractError: A shape or dtype is off, scale is not finite and above 0; in value checks: decreasing
            cu_seqlens, a last value above T, max_seqlen too small.

    Numerics: fp32 scores, softmax and sums; probabilities may be rounded to q's dtype; one rounding of out.

    Source: transformers `MiniMaxM3VLVisionAttention`.
    """
    acc = accumulate_dtype(q.dtype)
    out = torch.zeros(q.shape, dtype=acc, device=q.device)
    for start, stop in pairwise(cu_seqlens.tolist()):
        if stop > start:
            queries, keys, values = (x[start:stop].to(acc).transpose(0, 1) for x in (q, k, v))  # [n, length, D] each
            out[start:stop] = attend(queries, keys, values, scale)[0].transpose(0, 1)
    return out.to(q.dtype)


def _fake(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, max_seqlen: int, deterministic: bool = False) -> Tensor:
    return torch.empty_like(q, memory_format=torch.contiguous_format)


def _check(q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, max_seqlen: int, deterministic: bool = False) -> None:
    expect_rank("q", q, "T n D")
    expect_sizes("q", q, "T n D", 1, 2)
    expect_dtype("q", q, FLOATS)
    for argument, tensor in (("k", k), ("v", v)):
        expect_shape(argument, tensor, "T n D", q.shape)
        expect_dtype(argument, tensor, (q.dtype,))
    expect_rank("cu_seqlens", cu_seqlens, "B+1")
    expect_dtype("cu_seqlens", cu_seqlens, (torch.int32,))
    if cu_seqlens.shape[0] == 0:
        fail("cu_seqlens", "shape [0]", "[B+1], at least the leading 0")
    expect_positive("scale", scale)
    expect_at_least("max_seqlen", max_seqlen, 0)


def _check_values(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, max_seqlen: int, deterministic: bool = False
) -> None:
    starts = expect_prefix_sums("cu_seqlens", cu_seqlens, q.shape[0], "T")
    for b, (start, stop) in enumerate(pairwise(starts)):
        if stop - start > max_seqlen:
            fail("max_seqlen", f"value {max_seqlen}", f"at least {stop - start}, the length of sequence {b}")


def _unowned(call: Call) -> dict[str, Tensor]:
    padding = torch.arange(call["q"].shape[0]) >= call["cu_seqlens"][-1]
    return {name: padding[:, None, None].expand_as(call[name]) for name in ("q", "k", "v")}


def _call(draw: Draw, dtype: torch.dtype, lengths: list[int], **options: Any) -> Call:
    num_rows, heads, dim = sum(lengths) + options.get("padding", 0), options.get("heads", 3), options.get("dim", 16)
    return {
        "q": draw.values((num_rows, heads, dim), dtype, scale=4),
        "k": draw.values((num_rows, heads, dim), dtype),
        "v": draw.values((num_rows, heads, dim), dtype),
        "cu_seqlens": torch.tensor([0, *lengths]).cumsum(0).to(torch.int32),
        "scale": draw.softmax_scale(dim),
        "max_seqlen": max(lengths, default=0),
        "deterministic": options.get("deterministic", False),
    }


def _sample(*lengths: int, **options: Any) -> Any:
    return lambda draw, dtype: _call(draw, dtype, list(lengths), **options)


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    lengths = [draw.integer(0, 90) for _ in range(draw.integer(0, 5))]
    options = {"heads": draw.integer(1, 5), "dim": draw.choice((8, 16, 40, 80)), "padding": draw.integer(0, 3)}
    return _call(draw, dtype, lengths, deterministic=draw.integer(0, 2) == 1, **options)


SPEC = OpSpec(
    reference=varlen_attention,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("out",),
    tolerances={"out": reduction_tolerances()},
    sequence_axes={"q": 0, "k": 0, "v": 0, "out": 0},
    unowned=_unowned,
    samples=(
        Sample(name="images", make=_sample(24, 0, 7, 100)),
        Sample(name="vision_head", make=_sample(33, 12, heads=2, dim=80)),
        Sample(name="one_token_each", make=_sample(1, 1, 1)),
        Sample(name="empty_sequences", make=_sample(0, 0, 5, 0, 4)),
        Sample(name="padded_rows", make=_sample(6, 9, padding=4)),
        Sample(name="deterministic", make=_sample(17, 40, deterministic=True)),
        Sample(name="no_sequences", make=_sample()),
        Sample(name="no_tokens", make=_sample(0, 0)),
        Sample(name="vision_tower", tier="model", make=_sample(1024, 576, 300, heads=16, dim=80)),
        Sample(name="long_video", tier="stress", make=_sample(4099, 1, 1023, heads=16, dim=80), dtypes=(torch.bfloat16,)),
        Sample(name="many_images", tier="stress", make=_sample(*range(1, 120), heads=2, dim=80)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="q of rank 2", argument="q", change=spoil(q=lambda x: x[:, 0])),
        ErrorSample(name="integer q", argument="q", change=spoil(q=lambda x: x.int())),
        ErrorSample(name="k shorter", argument="k", change=spoil(k=lambda x: x[1:])),
        ErrorSample(name="v of another dtype", argument="v", change=spoil(v=lambda x: x.double())),
        ErrorSample(name="head size of v differs", argument="v", change=spoil(v=lambda x: x[..., 1:])),
        ErrorSample(name="cu_seqlens in int64", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: x.long())),
        ErrorSample(name="cu_seqlens empty", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: x[:0])),
        ErrorSample(name="cu_seqlens of rank 2", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: x[None])),
        ErrorSample(name="cu_seqlens not from 0", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: x + 1), reads_values=True),
        ErrorSample(name="cu_seqlens decreasing", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: -x), reads_values=True),
        ErrorSample(name="cu_seqlens past T", argument="cu_seqlens", change=spoil(cu_seqlens=lambda x: x * 9), reads_values=True),
        ErrorSample(name="max_seqlen too small", argument="max_seqlen", change=spoil(max_seqlen=1), reads_values=True),
        ErrorSample(name="max_seqlen negative", argument="max_seqlen", change=spoil(max_seqlen=-1)),
        ErrorSample(name="scale infinite", argument="scale", change=spoil(scale=float("inf"))),
    ),
)

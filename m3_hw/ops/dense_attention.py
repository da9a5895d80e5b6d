"""Causal attention over the whole cache: M3's dense layers, and the baseline of the sparse ones."""

from typing import Any

import torch
from torch import Tensor

from m3_hw import workloads
from m3_hw.contract import expect_at_least, expect_sequence_values
from m3_hw.draw import Draw
from m3_hw.paged import (
    ATTENTION_ERRORS,
    at_m3_heads,
    attend,
    attention_call,
    attention_tolerances,
    check_attention,
    num_blocks,
    random_batch,
    sequences,
    unowned,
    with_far_pages,
)
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, spoil


def dense_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Causal softmax attention over every key of a paged cache.

    out[t, h] = softmax(scale * q[t, h] . K) V over keys i <= position(t)

    Args:
        q: [T, Hq, D] packed queries; query head h uses kv head h // (Hq / Hkv).
        k_cache, v_cache: [N, Hkv, 128, D] paged caches in q's dtype or fp8 e4m3fn.
        block_table: [B, M] int32, page of each logical block; what lies past a sequence's length may hold anything.
        cu_seqlens_q: [B+1] int32, prefix sums of the queries. Rows of q past the last are padding.
        seq_lens: [B] int32, keys of each sequence, this call's queries included.
        scale: Factor on the scores, usually D ** -0.5.
        max_seqlen_q: At least the longest sequence's number of queries (a host size, for the launch).
        max_seqlen_k: At least the longest sequence's number of keys.
        k_scale, v_scale: What stored keys and values are multiplied by.
        deterministic: Same bits for a sequence whatever else is in the batch.

    Returns:
        out: [T, Hq, D] in q's dtype, fresh. Padding rows give zeros.
        lse: [T, Hq] fp32 (fp64 on fp64 input), natural log of the sum of exp(score); -inf in padding rows.

    Raises:
        ContractError: A shape, dtype or count is off, a scale is not finite and above 0; in value checks: decreasing
            cu_seqlens_q, seq_lens shorter than the queries or longer than the table holds, a page outside the pool.

    Numerics: fp32 scores, softmax and sums; probabilities may be rounded to q's dtype; one rounding of out.

    Source: transformers `MiniMaxM3VLAttention`, full-attention layers.
    """
    acc = accumulate_dtype(q.dtype)
    num_kv_heads = k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=acc, device=q.device)  # [T, Hq, D]
    lse = torch.full(q.shape[:2], -torch.inf, dtype=acc, device=q.device)
    for b, rows, first, length in sequences(cu_seqlens_q, seq_lens):
        pages = block_table[b, : num_blocks(length)].long()
        keys = k_cache[pages].transpose(0, 1).flatten(1, 2)  # [Hkv, blocks * P, D]
        values = v_cache[pages].transpose(0, 1).flatten(1, 2)
        for t in rows:
            visible = first + t - rows.start + 1
            grouped_q = q[t].to(acc).view(num_kv_heads, -1, q.shape[2])  # [Hkv, G, D]
            head_out, head_lse = attend(grouped_q, keys[:, :visible].to(acc) * k_scale, values[:, :visible].to(acc) * v_scale, scale)
            out[t], lse[t] = head_out.flatten(0, 1), head_lse.flatten()
    return out.to(q.dtype), lse


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=accumulate_dtype(q.dtype))


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> None:
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_seqlen_q, k_scale, v_scale)
    expect_at_least("max_seqlen_k", max_seqlen_k, 0)


def _check_values(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    max_seqlen_k: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> None:
    expect_sequence_values(
        cu_seqlens_q,
        seq_lens,
        block_table,
        num_tokens=q.shape[0],
        num_pages=k_cache.shape[0],
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _call(draw: Draw, dtype: torch.dtype, queries: list[int], lengths: list[int], **options: Any) -> Call:
    call = attention_call(draw, dtype, queries, lengths, **options)
    call["max_seqlen_k"] = max(lengths, default=0)
    return {name: call[name] for name in dense_attention.__annotations__ if name in call}


def _sample(queries: list[int], lengths: list[int], **options: Any) -> Any:
    return lambda draw, dtype: _call(draw, dtype, queries, lengths, **options)


def _workload_sample(workload: workloads.Workload) -> Sample:
    queries, lengths, heads, note = at_m3_heads(workload, max_queries=4)
    return Sample(name=workload.name, tier="model", make=_sample(queries, lengths, **heads), note=note)


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    queries, lengths, options = random_batch(draw)
    return _call(draw, dtype, queries, lengths, **options)


SPEC = OpSpec(
    reference=dense_attention,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("out", "lse"),
    tolerances=attention_tolerances(),
    token_axes={"q": 0, "out": 0, "lse": 0},
    pools={"block_table": ("k_cache", "v_cache")},
    unowned=unowned,
    golden=lambda **call: dense_attention(**{**call, "q": call["q"].double()}),
    samples=(
        Sample(name="mixed", make=_sample([5, 0, 37, 1], [530, 0, 300, 129])),
        Sample(name="prefill", make=_sample([260], [260])),
        Sample(name="decode", make=_sample([1, 1, 1], [700, 128, 1], heads=16, kv_heads=1)),
        Sample(name="verify", make=_sample([4, 4], [513, 260])),
        Sample(name="odd_head", make=_sample([3], [300], heads=6, kv_heads=2, dim=20)),
        Sample(name="fp8_cache", make=_sample([3, 1], [400, 290], fp8=True, dim=32)),
        Sample(name="deterministic", make=_sample([3, 5], [400, 290], deterministic=True)),
        Sample(name="fp8_tiles", make=_sample([130], [200], fp8=True)),
        Sample(name="fp8_deterministic", make=_sample([3, 5], [400, 290], fp8=True, dim=32, deterministic=True)),
        Sample(name="long_decode", make=_sample([1], [4200], heads=2)),
        Sample(name="padded_rows", make=_sample([2, 3], [260, 515], padding=3)),
        Sample(name="no_queries", make=_sample([0, 0], [300, 0])),
        Sample(name="no_sequences", make=_sample([], [])),
        *(_workload_sample(w) for w in workloads.for_parity()[::3]),
        Sample(name="long_context", tier="stress", make=_sample([2], [2**17 - 3], heads=64, kv_heads=4, dim=128), dtypes=(torch.bfloat16,)),
        Sample(name="far_pages", tier="stress", make=lambda draw, dtype: with_far_pages(_call(draw, dtype, [3], [500]))),
        Sample(name="many_sequences", tier="stress", make=_sample([3] * 64, [131 * i + 3 for i in range(64)])),
    ),
    random_sample=_random_sample,
    error_samples=(
        *ATTENTION_ERRORS,
        ErrorSample(name="max_seqlen_k too small", argument="max_seqlen_k", change=spoil(max_seqlen_k=100), reads_values=True),
        ErrorSample(name="max_seqlen_k negative", argument="max_seqlen_k", change=spoil(max_seqlen_k=-1)),
    ),
)

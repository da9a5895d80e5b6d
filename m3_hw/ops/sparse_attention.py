"""Attention over the KV blocks that each query chose: MSA."""

from typing import Any

import torch
from torch import Tensor

from m3_hw import workloads
from m3_hw.contract import PAGE_SIZE, expect_dtype, expect_sequence_values, expect_shape, expect_sizes
from m3_hw.draw import Draw
from m3_hw.paged import (
    ATTENTION_ERRORS,
    at_m3_heads,
    attend,
    attention_call,
    attention_tolerances,
    check_attention,
    random_batch,
    sequences,
    unowned,
    with_far_pages,
)
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, spoil


def sparse_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    """Exact softmax attention over the keys of the listed blocks that the query may see.

    out[t, h] = softmax(scale * q[t, h] . K) V over keys i <= position(t) in blocks block_ids[h // G, t]

    Args:
        q: [T, Hq, D] packed queries.
        k_cache, v_cache: [N, Hkv, 128, D] paged caches in q's dtype or fp8 e4m3fn.
        block_ids: [Hkv, T, K] int32, in any order: -1 anywhere is skipped, an id past the query's own block is
            dropped, a repeated id counts once.
        block_table: [B, M] int32, page of each logical block; what lies past a sequence's length may hold anything.
        cu_seqlens_q: [B+1] int32, prefix sums of the queries. Rows of q past the last are padding.
        seq_lens: [B] int32, keys of each sequence, this call's queries included.
        scale: Factor on the scores, usually D ** -0.5.
        max_seqlen_q: At least the longest sequence's number of queries (a host size, for the launch).
        k_scale, v_scale: What stored keys and values are multiplied by.
        deterministic: Same bits for a sequence whatever else is in the batch.

    Returns:
        out: [T, Hq, D] in q's dtype, fresh. Queries without a key, and padding rows, give zeros.
        lse: [T, Hq] fp32 (fp64 on fp64 input), natural log of the sum of exp(score); -inf without a key.

    Raises:
        ContractError: A shape, dtype or count is off, a scale is not finite and above 0; in value checks: decreasing
            cu_seqlens_q, seq_lens shorter than the queries or longer than the table holds, a page outside the pool.

    Numerics: fp32 scores, softmax and sums; probabilities may be rounded to q's dtype; one rounding of out.

    Source: transformers `MiniMaxM3VLAttention` given block indices.
    """
    acc = accumulate_dtype(q.dtype)
    num_kv_heads = k_cache.shape[1]
    out = torch.zeros(q.shape, dtype=acc, device=q.device)  # [T, Hq, D]
    lse = torch.full(q.shape[:2], -torch.inf, dtype=acc, device=q.device)
    for b, rows, first, _ in sequences(cu_seqlens_q, seq_lens):
        for t in rows:
            position = first + t - rows.start
            grouped_q = q[t].to(acc).view(num_kv_heads, -1, q.shape[2])  # [Hkv, G, D]
            for h in range(num_kv_heads):
                ids = torch.unique(block_ids[h, t]).long()
                ids = ids[(ids >= 0) & (ids <= position // PAGE_SIZE)]
                pages = block_table[b, ids].long()
                visible = (ids[:, None] * PAGE_SIZE + torch.arange(PAGE_SIZE, device=q.device)) <= position  # [blocks, P]
                keys = k_cache[pages, h][visible].to(acc) * k_scale  # [keys, D]
                values = v_cache[pages, h][visible].to(acc) * v_scale
                if len(keys):
                    heads = slice(h * grouped_q.shape[1], (h + 1) * grouped_q.shape[1])
                    out[t, heads], lse[t, heads] = attend(grouped_q[h], keys, values, scale)
    return out.to(q.dtype), lse


def _fake(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> tuple[Tensor, Tensor]:
    return torch.empty_like(q, memory_format=torch.contiguous_format), q.new_empty(q.shape[:2], dtype=accumulate_dtype(q.dtype))


def _check(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> None:
    check_attention(q, k_cache, v_cache, block_table, cu_seqlens_q, seq_lens, scale, max_seqlen_q, k_scale, v_scale)
    expect_shape("block_ids", block_ids, "Hkv T K", (k_cache.shape[1], q.shape[0], -1))
    expect_sizes("block_ids", block_ids, "Hkv T K", 2)
    expect_dtype("block_ids", block_ids, (torch.int32,))


def _check_values(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_ids: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    scale: float,
    max_seqlen_q: int,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    deterministic: bool = False,
) -> None:
    expect_sequence_values(
        cu_seqlens_q, seq_lens, block_table, num_tokens=q.shape[0], num_pages=k_cache.shape[0], max_seqlen_q=max_seqlen_q
    )


def _selection(draw: Draw, call: Call, top_k: int) -> Tensor:
    """[Hkv, T, K] as select_blocks gives it: distinct ids ascending, the query's own block last, then -1."""
    ids = torch.full((call["k_cache"].shape[1], call["q"].shape[0], top_k), -1, dtype=torch.int32)
    for _, rows, first, _ in sequences(call["cu_seqlens_q"], call["seq_lens"]):
        for t in rows:
            own = (first + t - rows.start) // PAGE_SIZE
            count = min(top_k - 1, own)
            for h in range(ids.shape[0]):
                ids[h, t, :count] = draw.permutation(own)[:count].sort().values
            ids[:, t, count] = own
    return ids


def _call(draw: Draw, dtype: torch.dtype, queries: list[int], lengths: list[int], *, top_k: int = 2, **options: Any) -> Call:
    call = attention_call(draw, dtype, queries, lengths, **options)
    return _in_order({**call, "block_ids": _selection(draw, call, top_k)})


def _in_order(call: Call) -> Call:
    return {name: call[name] for name in sparse_attention.__annotations__ if name in call}


def _sample(queries: list[int], lengths: list[int], **options: Any) -> Any:
    return lambda draw, dtype: _call(draw, dtype, queries, lengths, **options)


def _unruly_ids(draw: Draw, dtype: torch.dtype, queries: list[int], lengths: list[int], **options: Any) -> Call:
    """Any ids: unsorted, repeated, -1 anywhere, past the query's own block and past the block table."""
    call = _call(draw, dtype, queries, lengths, **options)
    most = call["block_table"].shape[1] + 2
    call["block_ids"] = draw.integers(-1, most, call["block_ids"].shape).int()
    return call


def _no_blocks(draw: Draw, dtype: torch.dtype) -> Call:
    """Some queries chose nothing at all."""
    call = _call(draw, dtype, [4, 2], [300, 200])
    call["block_ids"][:, ::2] = -1
    return call


def _growing_scores(draw: Draw, dtype: torch.dtype) -> Call:
    """Every block's scores are 4 times those before it and reach past 100: partial softmaxes must be rescaled as they merge."""
    call = _call(draw, dtype, [300], [700], top_k=3)
    call["q"] = (call["q"].abs() + 1).to(dtype)
    call["q"][:, 1::2] *= 2.0**-10  # these heads need no rescaling
    for block, page in enumerate(call["block_table"][0, :6].tolist()):
        call["k_cache"][page] = (call["k_cache"][page].abs() + 1) * 4.0 ** (block - 3)
    return call


def _workload_sample(workload: workloads.Workload) -> Sample:
    queries, lengths, heads, note = at_m3_heads(workload, max_queries=32)
    return Sample(name=workload.name, tier="model", make=_sample(queries, lengths, top_k=16, **heads), note=note)


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    queries, lengths, options = random_batch(draw)
    make = draw.choice((_call, _unruly_ids))
    return make(draw, dtype, queries, lengths, top_k=draw.integer(1, 6), **options)


SPEC = OpSpec(
    reference=sparse_attention,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("out", "lse"),
    tolerances=attention_tolerances(),
    token_axes={"q": 0, "block_ids": 1, "out": 0, "lse": 0},
    pools={"block_table": ("k_cache", "v_cache")},
    unowned=unowned,
    golden=lambda **call: sparse_attention(**{**call, "q": call["q"].double()}),
    samples=(
        Sample(name="mixed", make=_sample([5, 0, 37, 1], [530, 0, 300, 129])),
        Sample(name="unruly_ids", make=lambda draw, dtype: _unruly_ids(draw, dtype, [7, 3], [600, 130], top_k=5)),
        Sample(name="no_blocks", make=_no_blocks),
        Sample(name="decode", make=_sample([1, 1, 1], [700, 128, 1], heads=16, kv_heads=1, top_k=4)),
        Sample(name="verify", make=_sample([4, 4], [513, 260], top_k=3)),
        Sample(name="as_many_tokens_as_heads", make=_sample([2], [400], kv_heads=2, heads=2)),
        Sample(name="odd_head", make=_sample([3], [300], heads=6, kv_heads=2, dim=20)),
        Sample(name="fp8_cache", make=_sample([3, 1], [400, 290], fp8=True, dim=32)),
        Sample(name="deterministic", make=_sample([3, 5], [400, 290], deterministic=True)),
        Sample(name="fp8_deterministic", make=_sample([37], [300], fp8=True, dim=32, deterministic=True)),
        Sample(name="wide", make=_sample([300], [700], top_k=3)),
        Sample(name="wide_fp8", make=_sample([37], [300], fp8=True, dim=32)),
        Sample(name="wide_deterministic", make=_sample([260], [700], heads=1, kv_heads=1, deterministic=True)),
        Sample(name="growing_scores", make=_growing_scores),
        Sample(name="padded_rows", make=_sample([2, 3], [260, 515], padding=3)),
        Sample(name="no_queries", make=_sample([0, 0], [300, 0])),
        Sample(name="no_sequences", make=_sample([], [])),
        *(_workload_sample(w) for w in workloads.for_parity()),
        Sample(
            name="long_context",
            tier="stress",
            make=_sample([64], [2**18 - 3], heads=64, kv_heads=4, dim=128, top_k=16),
            dtypes=(torch.bfloat16,),
        ),
        Sample(name="far_pages", tier="stress", make=lambda draw, dtype: with_far_pages(_call(draw, dtype, [3], [500]))),
        Sample(name="many_sequences", tier="stress", make=_sample([3] * 64, [131 * i + 3 for i in range(64)], top_k=5)),
    ),
    random_sample=_random_sample,
    error_samples=(
        *ATTENTION_ERRORS,
        ErrorSample(name="block_ids for tokens first", argument="block_ids", change=spoil(block_ids=lambda x: x.transpose(0, 1))),
        ErrorSample(name="block_ids without choices", argument="block_ids", change=spoil(block_ids=lambda x: x[..., :0])),
        ErrorSample(name="block_ids in int64", argument="block_ids", change=spoil(block_ids=lambda x: x.long())),
        ErrorSample(name="block_ids of one head", argument="block_ids", change=spoil(block_ids=lambda x: x[:1])),
        ErrorSample(name="block_ids of rank 2", argument="block_ids", change=spoil(block_ids=lambda x: x[0])),
    ),
)

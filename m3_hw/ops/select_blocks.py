"""Which KV blocks each query attends to: the MSA indexer."""

from typing import Any

import torch
from torch import Tensor

from m3_hw import workloads
from m3_hw.contract import (
    FLOATS,
    FP8,
    PAGE_SIZE,
    expect_at_least,
    expect_cache,
    expect_dtype,
    expect_rank,
    expect_sequence_values,
    expect_sequences,
    expect_sizes,
    fail,
)
from m3_hw.draw import Draw
from m3_hw.paged import BATCH_ERRORS, at_m3_heads, num_blocks, paged_batch, sequences, unowned, with_far_pages
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, Tolerance, accumulate_dtype, spoil


def select_blocks(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    local_blocks: int,
    init_blocks: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    """Choose the KV blocks that each query attends to, one list per index head.

    score(h, t, j) = max over keys i of block j with i <= position(t) of dot(index_q[t, h], index_k[i])

    Visible blocks are 0 .. position // 128. The `local_blocks` ending at the query's own and the first
    `init_blocks` are always taken, local before init when they don't all fit; then the highest scores. Equal
    scores: lower block first. A block with a NaN score ranks lowest, below -inf; +0 equals -0.

    Args:
        index_q: [T, Hi, Di] packed queries.
        index_k_cache: [N, 128, Di] paged index keys, in index_q's dtype or fp8 e4m3fn (any positive scale: it can't
            change the order).
        block_table: [B, M] int32, page of each logical block; what lies past a sequence's length may hold anything.
        cu_seqlens_q: [B+1] int32, prefix sums of the queries. Rows of index_q past the last are padding.
        seq_lens: [B] int32, keys of each sequence, this call's queries included.
        top_k: Blocks a query takes, K.
        local_blocks: Blocks forced before and including the query's own; M3 has 1. At most top_k.
        init_blocks: First blocks forced; M3 has 0.
        max_seqlen_q: At least the longest sequence's number of queries (a host size, for the launch).
        max_seqlen_k: At least the longest sequence's number of keys.

    Returns:
        [Hi, T, K] int32, fresh: block ids ascending and packed left, then -1. No duplicates. Padding rows: all -1.

    Raises:
        ContractError: A shape, dtype or count is off; in value checks: decreasing cu_seqlens_q, seq_lens shorter than
            the queries or longer than the table holds, a page outside the pool.

    Numerics: fp32 products and sums. Scores closer than fp32 rounding may rank either way (near ties).

    Source: transformers `MiniMaxM3VLIndexer`; tie order from the contract (operators.md).
    """
    num_tokens, num_heads, _ = index_q.shape
    acc = accumulate_dtype(index_q.dtype)
    ids = torch.full((num_heads, num_tokens, top_k), -1, dtype=torch.int32, device=index_q.device)
    for b, rows, first, length in sequences(cu_seqlens_q, seq_lens):
        keys = index_k_cache[block_table[b, : num_blocks(length)].long()].flatten(0, 1)  # [blocks * P, Di]
        for t in rows:
            position = first + t - rows.start
            scores = block_scores(index_q[t].to(acc), keys[: position + 1].to(acc))  # [Hi, visible]
            chosen = choose_blocks(scores, top_k, local_blocks, init_blocks)  # [Hi, <= K]
            ids[:, t, : chosen.shape[1]] = chosen.int()
    return ids


def block_scores(query: Tensor, keys: Tensor) -> Tensor:
    """[Hi, Di] x [keys, Di] -> the best score of each block, [Hi, blocks]; NaN if any of the block's is."""
    scores = query @ keys.T  # [Hi, keys]
    tail = -scores.shape[1] % PAGE_SIZE
    padded = torch.nn.functional.pad(scores, (0, tail), value=-torch.inf)
    return padded.view(padded.shape[0], -1, PAGE_SIZE).amax(-1)


def choose_blocks(scores: Tensor, top_k: int, local_blocks: int, init_blocks: int) -> Tensor:
    """[Hi, visible] scores of one query -> ids of the blocks it takes, ascending, [Hi, min(K, visible)]."""
    visible = scores.shape[1]
    block = torch.arange(visible, device=scores.device)
    priority = torch.where(block < init_blocks, 1, 2)
    priority = torch.where(block >= visible - local_blocks, 0, priority).expand_as(scores)  # 0: local, 1: init, 2: by score
    unranked = scores.isnan()
    rank = torch.where((priority < 2) | unranked, -torch.inf, scores)  # forced blocks rank by id alone
    # Stable sorts, the last one deciding first: priority, then NaN last, then score, then the lower block.
    order = rank.argsort(dim=-1, descending=True, stable=True)
    order = order.gather(-1, (unranked & (priority == 2)).gather(-1, order).int().argsort(dim=-1, stable=True))
    order = order.gather(-1, priority.gather(-1, order).argsort(dim=-1, stable=True))
    return order[:, :top_k].sort(-1).values


def _fake(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    local_blocks: int,
    init_blocks: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> Tensor:
    return index_q.new_empty((index_q.shape[1], index_q.shape[0], top_k), dtype=torch.int32)


def _check(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    local_blocks: int,
    init_blocks: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    expect_rank("index_q", index_q, "T Hi Di")
    expect_sizes("index_q", index_q, "T Hi Di", 1, 2)
    expect_dtype("index_q", index_q, FLOATS)
    expect_cache("index_k_cache", index_k_cache, "N P Di", (-1, PAGE_SIZE, index_q.shape[2]), index_q.dtype)
    expect_sequences(cu_seqlens_q, seq_lens, block_table)
    expect_at_least("top_k", top_k, 1)
    if not 0 <= local_blocks <= top_k:
        fail("local_blocks", f"value {local_blocks}", f"0 to top_k = {top_k}")
    expect_at_least("init_blocks", init_blocks, 0)
    expect_at_least("max_seqlen_q", max_seqlen_q, 0)
    expect_at_least("max_seqlen_k", max_seqlen_k, 0)


def _check_values(
    index_q: Tensor,
    index_k_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    *,
    top_k: int,
    local_blocks: int,
    init_blocks: int,
    max_seqlen_q: int,
    max_seqlen_k: int,
) -> None:
    expect_sequence_values(
        cu_seqlens_q,
        seq_lens,
        block_table,
        num_tokens=index_q.shape[0],
        num_pages=index_k_cache.shape[0],
        max_seqlen_q=max_seqlen_q,
        max_seqlen_k=max_seqlen_k,
    )


def _scores(call: Call) -> Tensor:
    """[Hi, T, M] fp64: score of every block; +inf forced, -inf not a candidate, the lowest finite number for NaN."""
    query, finite = call["index_q"].double(), torch.finfo(torch.float64).max
    num_tokens, num_heads, _ = query.shape
    scores = torch.full((num_heads, num_tokens, call["block_table"].shape[1]), -torch.inf, dtype=torch.float64)
    for b, rows, first, length in sequences(call["cu_seqlens_q"], call["seq_lens"]):
        keys = call["index_k_cache"][call["block_table"][b, : num_blocks(length)].long()].flatten(0, 1).double()
        for t in rows:
            own = (first + t - rows.start) // PAGE_SIZE
            row = block_scores(query[t], keys[: first + t - rows.start + 1])
            row = row.nan_to_num(nan=-finite, posinf=finite / 2, neginf=-finite / 2)
            num_init = max(0, min(call["init_blocks"], own + 1, call["top_k"] - min(call["local_blocks"], own + 1)))
            row[:, :num_init] = torch.inf
            row[:, max(0, own + 1 - call["local_blocks"]) :] = torch.inf
            scores[:, t, : own + 1] = row
    return scores


def _call(draw: Draw, dtype: torch.dtype, queries: list[int], lengths: list[int], **options: Any) -> Call:
    """A call on drawn data. Options: the operator's scalars, heads, dim, fp8, values (the scale of both), padding."""
    batch, num_rows, num_pages = paged_batch(draw, queries, lengths, num_padding_rows=options.get("padding", 0))
    heads, dim, scale = options.get("heads", 2), options.get("dim", 16), options.get("values", 1.0)
    cache = draw.values((num_pages, PAGE_SIZE, dim), dtype, scale=scale)
    return {
        "index_q": draw.values((num_rows, heads, dim), dtype, scale=scale),
        "index_k_cache": cache.to(FP8) if options.get("fp8") else cache,
        **batch,
        "top_k": options.get("top_k", 2),
        "local_blocks": options.get("local_blocks", 1),
        "init_blocks": options.get("init_blocks", 0),
        "max_seqlen_q": max(queries, default=0),
        "max_seqlen_k": max(lengths, default=0),
    }


def _sample(queries: list[int], lengths: list[int], **options: Any) -> Any:
    return lambda draw, dtype: _call(draw, dtype, queries, lengths, **options)


def _ties(draw: Draw, dtype: torch.dtype) -> Call:
    """Scores of -1, 0 and 1 alone: most blocks tie."""
    call = _call(draw, dtype, [6, 3], [800, 520], top_k=3)
    call["index_q"] = torch.nn.functional.one_hot(draw.integers(0, 16, (9, 2)), 16).to(dtype)
    call["index_k_cache"] = draw.integers(-1, 2, call["index_k_cache"].shape).to(dtype)
    return call


def _special_scores(top_k: int) -> Any:
    """One query over blocks that score NaN, inf, -inf, 0, -0, 7, -2^9, 7 and its own: K = 5 cuts between 0 and -0, 8 leaves out NaN."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        call = _call(draw, dtype, [1], [8 * PAGE_SIZE + 5], top_k=top_k, heads=1)
        scores = torch.tensor([torch.nan, torch.inf, -torch.inf, 0.0, -0.0, 7.0, -512.0, 7.0, 1.0])
        call["index_q"].zero_()[..., 0] = 1
        call["index_k_cache"].zero_()[call["block_table"][0, :9].long(), :, 0] = scores[:, None].to(dtype)
        return call

    return make


def _workload_sample(workload: workloads.Workload) -> Sample:
    queries, lengths, _, note = at_m3_heads(workload, max_queries=32)
    return Sample(name=workload.name, tier="model", make=_sample(queries, lengths, heads=4, dim=128, top_k=16, values=0.5), note=note)


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    lengths = [draw.integer(0, 900) for _ in range(draw.integer(1, 4))]
    queries = [draw.integer(0, min(length, 6) + 1) for length in lengths]
    top_k = draw.integer(1, 8)
    options = {"heads": draw.integer(1, 5), "dim": draw.choice((8, 16, 40)), "padding": draw.integer(0, 3), "fp8": draw.integer(0, 4) == 0}
    forced = {"top_k": top_k, "local_blocks": draw.integer(0, min(top_k, 3) + 1), "init_blocks": draw.integer(0, 3)}
    return _call(draw, dtype, queries, lengths, **options, **forced)


SPEC = OpSpec(
    reference=select_blocks,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("ids",),
    tolerances={
        "ids": dict.fromkeys(
            FLOATS,
            Tolerance(
                rule="selection",
                margin=2.0**-18,
                reason="fp32 sums in another order move a score by 2^-18 of the row's largest at most; nearer scores may swap",
            ),
        )
    },
    token_axes={"index_q": 0, "ids": 1},
    pools={"block_table": ("index_k_cache",)},
    unowned=unowned,
    scores=_scores,
    golden=lambda **call: select_blocks(**{**call, "index_q": call["index_q"].double()}),
    samples=(
        Sample(name="mixed", make=_sample([5, 0, 37, 1], [530, 0, 300, 129])),
        Sample(name="ties", make=_ties),
        Sample(name="zeros_tie", make=_special_scores(5)),
        Sample(name="nan_ranks_lowest", make=_special_scores(8)),
        Sample(name="init_and_local", make=_sample([9, 2], [900, 700], top_k=4, local_blocks=2, init_blocks=1)),
        Sample(name="forced_past_top_k", make=_sample([4], [900], top_k=3, local_blocks=2, init_blocks=5)),
        Sample(name="nothing_forced", make=_sample([4, 4], [512, 385], top_k=1, local_blocks=0)),
        Sample(name="all_fit", make=_sample([3, 2], [300, 2], top_k=16)),
        Sample(name="verify", make=_sample([4, 4, 4], [640, 128, 257], heads=4)),
        Sample(name="odd_top_k", make=_sample([2], [2500], top_k=17)),
        Sample(name="fp8_keys", make=_sample([3, 1], [600, 400], fp8=True, dim=32)),
        Sample(name="wide", make=_sample([300], [1400], heads=4, top_k=1, local_blocks=0)),
        Sample(name="padded_rows", make=_sample([2, 3], [260, 515], padding=3)),
        Sample(name="no_queries", make=_sample([0, 0], [300, 0])),
        Sample(name="no_sequences", make=_sample([], [])),
        *(_workload_sample(w) for w in workloads.for_parity()),
        Sample(name="million_keys", tier="stress", make=_sample([64], [2**20 - 3], heads=4, dim=128, top_k=16), dtypes=(torch.bfloat16,)),
        Sample(name="many_sequences", tier="stress", make=_sample([3] * 64, [131 * i + 3 for i in range(64)], top_k=5)),
        Sample(name="far_pages", tier="stress", make=lambda draw, dtype: with_far_pages(_call(draw, dtype, [3], [500]))),
    ),
    random_sample=_random_sample,
    error_samples=(
        *BATCH_ERRORS,
        ErrorSample(name="index_q of rank 2", argument="index_q", change=spoil(index_q=lambda x: x[:, 0])),
        ErrorSample(name="integer index_q", argument="index_q", change=spoil(index_q=lambda x: x.int())),
        ErrorSample(name="index_q without heads", argument="index_q", change=spoil(index_q=lambda x: x[:, :0])),
        ErrorSample(name="page of 64", argument="index_k_cache", change=spoil(index_k_cache=lambda x: x[:, :64])),
        ErrorSample(name="index dim differs", argument="index_k_cache", change=spoil(index_k_cache=lambda x: x[..., 1:])),
        ErrorSample(name="fnuz cache", argument="index_k_cache", change=spoil(index_k_cache=lambda x: x.to(torch.float8_e4m3fnuz))),
        ErrorSample(name="top_k zero", argument="top_k", change=spoil(top_k=0)),
        ErrorSample(name="local_blocks above top_k", argument="local_blocks", change=spoil(local_blocks=3)),
        ErrorSample(name="local_blocks negative", argument="local_blocks", change=spoil(local_blocks=-1)),
        ErrorSample(name="init_blocks negative", argument="init_blocks", change=spoil(init_blocks=-1)),
        ErrorSample(name="max_seqlen_k too small", argument="max_seqlen_k", change=spoil(max_seqlen_k=100), reads_values=True),
    ),
)

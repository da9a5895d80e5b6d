"""Packed sequences over paged caches: what the attention operators' references, samples and checks share."""

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3_hw.contract import (
    FLOATS,
    FP8,
    PAGE_SIZE,
    expect_at_least,
    expect_cache,
    expect_dtype,
    expect_positive,
    expect_rank,
    expect_sequences,
    expect_sizes,
    fail,
)
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, Tolerance, reduction_tolerances, spoil
from m3_hw.workloads import Workload, scaled_for_cpu


class PackedSequence(NamedTuple):
    """One sequence of a packed batch: its row of the block table, its query rows, where the first one stands."""

    seq: int
    rows: range
    first_position: int
    length: int


def sequences(cu_seqlens_q: Tensor, seq_lens: Tensor) -> Iterator[PackedSequence]:
    """The sequences of a batch that have queries. Query i stands at seq_len - q_len + i. Reads the tensors."""
    starts: list[int] = cu_seqlens_q.tolist()
    for b, length in enumerate(seq_lens.tolist()):
        rows = range(starts[b], starts[b + 1])
        if rows:
            yield PackedSequence(b, rows, length - len(rows), length)


def num_blocks(length: int) -> int:
    """Blocks, and so pages, that hold `length` keys."""
    return -(-length // PAGE_SIZE)


def paged_batch(
    draw: Draw, num_queries: Sequence[int], lengths: Sequence[int], *, num_padding_rows: int = 0, num_spare_pages: int = 2
) -> tuple[dict[str, Tensor], int, int]:
    """The batch's tensors, the number of query rows and the number of pages in the pool.

    Pages are dealt in a drawn order, some belong to nobody, and what the block table doesn't use is -1.
    """
    blocks = [num_blocks(length) for length in lengths]
    num_pages = sum(blocks) + num_spare_pages
    pages = draw.permutation(num_pages).to(torch.int32)
    table = torch.full((len(lengths), max(blocks, default=0) + 1), -1, dtype=torch.int32)
    for b, count in enumerate(blocks):
        table[b, :count], pages = pages[:count], pages[count:]
    starts = torch.tensor([0, *num_queries]).cumsum(0).to(torch.int32)
    batch = {"block_table": table, "cu_seqlens_q": starts, "seq_lens": torch.tensor(lengths, dtype=torch.int32)}
    return batch, sum(num_queries) + num_padding_rows, num_pages


def unowned_slots(call: Call) -> Tensor:
    """[N, P] mask of the pool's slots that hold no key of the batch."""
    pool = next(call[name] for name in ("k_cache", "index_k_cache") if name in call)
    mask = torch.ones(pool.shape[0], PAGE_SIZE, dtype=torch.bool)
    for b, length in enumerate(call["seq_lens"].tolist()):
        for block in range(num_blocks(length)):
            mask[call["block_table"][b, block], : length - block * PAGE_SIZE] = False
    return mask


def unowned(call: Call) -> dict[str, Tensor]:
    """What nobody owns in a paged call: slots of the pools, columns of the table past a sequence's length, and query
    rows past the last sequence."""
    slots = unowned_slots(call)
    columns = torch.arange(call["block_table"].shape[1])
    masks = {"block_table": columns * PAGE_SIZE >= call["seq_lens"][:, None]}
    for name in ("k_cache", "v_cache"):
        if name in call:
            masks[name] = slots[:, None, :, None].expand_as(call[name])  # [N, Hkv, P, D]
    if "index_k_cache" in call:
        masks["index_k_cache"] = slots[:, :, None].expand_as(call["index_k_cache"])  # [N, P, Di]
    query = "q" if "q" in call else "index_q"
    rows = torch.arange(call[query].shape[0]) >= call["cu_seqlens_q"][-1]
    masks[query] = rows[:, None, None].expand_as(call[query])
    return masks


def check_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    block_table: Tensor,
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    scale: float,
    max_seqlen_q: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """What sparse and dense attention over a paged cache share."""
    expect_rank("q", q, "T Hq D")
    expect_sizes("q", q, "T Hq D", 1, 2)
    expect_dtype("q", q, FLOATS)
    expect_cache("k_cache", k_cache, "N Hkv P D", (-1, -1, PAGE_SIZE, q.shape[2]), q.dtype)
    expect_cache("v_cache", v_cache, "N Hkv P D", k_cache.shape, q.dtype)
    if k_cache.shape[1] == 0 or q.shape[1] % k_cache.shape[1]:
        fail("q", f"{q.shape[1]} heads", f"a multiple of k_cache's {k_cache.shape[1]} heads")
    expect_sequences(cu_seqlens_q, seq_lens, block_table)
    expect_positive("scale", scale)
    expect_at_least("max_seqlen_q", max_seqlen_q, 0)
    expect_positive("k_scale", k_scale)
    expect_positive("v_scale", v_scale)


def attend(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Softmax attention of q [..., G, D] over keys and values [..., n, D]: out [..., G, D], lse [..., G]."""
    scores = q @ keys.mT * scale  # [..., G, n]
    return scores.softmax(-1) @ values, scores.logsumexp(-1)


def attention_call(draw: Draw, dtype: torch.dtype, queries: list[int], lengths: list[int], **options: Any) -> Call:
    """The arguments that sparse and dense attention share. Options: heads, kv_heads, dim, fp8, padding, deterministic."""
    batch, num_rows, num_pages = paged_batch(draw, queries, lengths, num_padding_rows=options.get("padding", 0))
    kv_heads, dim, fp8 = options.get("kv_heads", 2), options.get("dim", 16), options.get("fp8", False)
    caches = [draw.values((num_pages, kv_heads, PAGE_SIZE, dim), dtype) for _ in range(2)]
    return {
        "q": draw.values((num_rows, options.get("heads", 4), dim), dtype, scale=4),
        "k_cache": caches[0].to(FP8) if fp8 else caches[0],
        "v_cache": caches[1].to(FP8) if fp8 else caches[1],
        **batch,
        "scale": draw.softmax_scale(dim),
        "max_seqlen_q": max(queries, default=0),
        "k_scale": 0.5 if fp8 else 1.0,
        "v_scale": 2.0 if fp8 else 1.0,
        "deterministic": options.get("deterministic", False),
    }


def with_far_pages(call: Call) -> Call:
    """The call with its pools' pages 2^30 elements apart, so that page * stride passes 2^31; what lies between is never touched."""
    stride = 2**30
    moved = {}
    for name in ("k_cache", "v_cache", "index_k_cache"):
        if (near := call.get(name)) is not None:
            size = stride * (near.shape[0] - 1) + near[0].numel()
            moved[name] = torch.empty(size, dtype=near.dtype).as_strided(near.shape, (stride, *near.stride()[1:])).copy_(near)
    return {**call, **moved}


def random_batch(draw: Draw) -> tuple[list[int], list[int], dict[str, Any]]:
    """Queries, lengths and attention_call's options of a random case."""
    lengths = [draw.integer(0, 700) for _ in range(draw.integer(1, 4))]
    queries = [draw.integer(0, min(length, 6) + 1) for length in lengths]
    kv_heads = draw.integer(1, 4)
    options: dict[str, Any] = {"heads": kv_heads * draw.choice((1, 2, 5)), "kv_heads": kv_heads, "dim": draw.choice((8, 40, 72, 128))}
    return (
        queries,
        lengths,
        {**options, "padding": draw.integer(0, 3), "fp8": draw.integer(0, 4) == 0, "deterministic": draw.integer(0, 2) == 1},
    )


def at_m3_heads(workload: Workload, max_queries: int) -> tuple[list[int], list[int], dict[str, Any], str]:
    """A production shape at M3's head counts, scaled down for the fp64 reference: queries, lengths, options, note."""
    scaled = scaled_for_cpu(workload, max_queries=max_queries)
    lengths = [scaled.kv_len - 7 * b for b in range(scaled.batch)]  # around the nominal length, none a multiple of the page
    return [scaled.num_queries] * scaled.batch, lengths, {"heads": 64, "kv_heads": 4, "dim": 128}, scaled.note


def attention_tolerances() -> dict[str, dict[torch.dtype, Tolerance]]:
    """Limits of out and lse."""
    exact = Tolerance(rule="rel_l2", limit=1e-5, worst_row=1e-4, unit=1.0, reason="fp32 scores and sums; lse is a logarithm, not rounded")
    fast_exp = Tolerance(
        rule="rel_l2",
        limit=1e-4,
        worst_row=5e-4,
        unit=1.0,
        reason="as fp32, with an exp good to 2^-14, as fused kernels have for half inputs: torch's on the CPU strays by 5.3e-5",
    )
    return {"out": reduction_tolerances(), "lse": {torch.float32: exact, torch.bfloat16: fast_exp, torch.float16: fast_exp}}


def _decreasing(starts: Tensor) -> Tensor:
    return torch.cat([starts[:-1], starts[-2:-1] - 1])


def _page_outside(pages: int) -> Any:
    return lambda table: torch.where(torch.arange(table.shape[1]) == 0, pages, table).int()


BATCH_ERRORS = (
    ErrorSample(name="cu_seqlens_q too short", argument="cu_seqlens_q", change=spoil(cu_seqlens_q=lambda x: x[1:])),
    ErrorSample(name="cu_seqlens_q in int64", argument="cu_seqlens_q", change=spoil(cu_seqlens_q=lambda x: x.long())),
    ErrorSample(name="cu_seqlens_q decreasing", argument="cu_seqlens_q", change=spoil(cu_seqlens_q=_decreasing), reads_values=True),
    ErrorSample(name="cu_seqlens_q negative", argument="cu_seqlens_q", change=spoil(cu_seqlens_q=lambda x: x - 1), reads_values=True),
    ErrorSample(name="cu_seqlens_q past T", argument="cu_seqlens_q", change=spoil(cu_seqlens_q=lambda x: x * 9), reads_values=True),
    ErrorSample(name="seq_lens of rank 2", argument="seq_lens", change=spoil(seq_lens=lambda x: x[None])),
    ErrorSample(name="seq_lens shorter than queries", argument="seq_lens", change=spoil(seq_lens=lambda x: x * 0), reads_values=True),
    ErrorSample(name="seq_lens past the table", argument="seq_lens", change=spoil(seq_lens=lambda x: x + 9999), reads_values=True),
    ErrorSample(name="block_table of another batch", argument="block_table", change=spoil(block_table=lambda x: x[1:])),
    ErrorSample(name="block_table in int64", argument="block_table", change=spoil(block_table=lambda x: x.long())),
    ErrorSample(name="page outside the pool", argument="block_table", change=spoil(block_table=_page_outside(9999)), reads_values=True),
    ErrorSample(name="negative page", argument="block_table", change=spoil(block_table=_page_outside(-1)), reads_values=True),
    ErrorSample(name="max_seqlen_q too small", argument="max_seqlen_q", change=spoil(max_seqlen_q=1), reads_values=True),
    ErrorSample(name="max_seqlen_q negative", argument="max_seqlen_q", change=spoil(max_seqlen_q=-1)),
)
"""Malformed batches that every paged operator must refuse."""

ATTENTION_ERRORS = (
    *BATCH_ERRORS,
    ErrorSample(name="q of rank 2", argument="q", change=spoil(q=lambda x: x[:, 0])),
    ErrorSample(name="integer q", argument="q", change=spoil(q=lambda x: x.int())),
    ErrorSample(name="q without heads", argument="q", change=spoil(q=lambda x: x[:, :0])),
    ErrorSample(name="q without channels", argument="q", change=spoil(q=lambda x: x[..., :0])),
    ErrorSample(name="v_scale beyond fp32", argument="v_scale", change=spoil(v_scale=1e39)),
    ErrorSample(name="heads don't divide", argument="q", change=spoil(q=lambda x: x[:, 1:])),
    ErrorSample(name="head size differs", argument="k_cache", change=spoil(k_cache=lambda x: x[..., 1:])),
    ErrorSample(name="page of 64", argument="k_cache", change=spoil(k_cache=lambda x: x[:, :, :64])),
    ErrorSample(name="page-major cache", argument="k_cache", change=spoil(k_cache=lambda x: x.transpose(1, 2))),
    ErrorSample(name="rank-3 cache", argument="k_cache", change=spoil(k_cache=lambda x: x[:, 0])),
    ErrorSample(name="fnuz cache", argument="k_cache", change=spoil(k_cache=lambda x: x.to(torch.float8_e4m3fnuz))),
    ErrorSample(name="e5m2 cache", argument="v_cache", change=spoil(v_cache=lambda x: x.to(torch.float8_e5m2))),
    ErrorSample(name="k and v differ in pages", argument="v_cache", change=spoil(v_cache=lambda x: x[1:])),
    ErrorSample(name="scale NaN", argument="scale", change=spoil(scale=float("nan"))),
    ErrorSample(name="scale zero", argument="scale", change=spoil(scale=0.0)),
    ErrorSample(name="k_scale infinite", argument="k_scale", change=spoil(k_scale=float("inf"))),
    ErrorSample(name="v_scale negative", argument="v_scale", change=spoil(v_scale=-1.0)),
)
"""Malformed calls that sparse and dense attention must refuse."""

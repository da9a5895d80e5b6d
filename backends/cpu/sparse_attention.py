"""sparse_attention on the CPU: each KV block is read once for all queries that chose it, or each query reads its own blocks.

By block ("KV outer"): an inverted index sorts the queries by block, one fused attention a block and key head takes
all of them, and partial results merge by their lse. Needs 4 * TILE * G * (D + 2) bytes for the sums, 16 MiB at M3's heads.
By query: gathers a query's blocks into one run of keys. For few queries a block, and always with `deterministic`, since
then a query's sums don't depend on what else is in the batch. Needs 2 * GATHERED * D elements of q's dtype, 64 MiB in fp32.
"""

import torch
from torch import Tensor

from m3_hw.backends.cpu._attention import Accumulator, Packed, causal_mask, fused, head_of_page, packed
from m3_hw.contract import PAGE_SIZE
from m3_hw.spec import accumulate_dtype

TILE = 2048
"""Queries whose sums are kept at once: they stay in the cache."""
GATHERED = 2**16
"""Keys gathered at once, by query."""
QUERIES_A_BLOCK = 4
"""From here on, on average, blocks are the outer loop."""


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
    num_kv_heads, group = k_cache.shape[1], q.shape[1] // k_cache.shape[1]
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulate_dtype(q.dtype))
    for sequence in packed(block_table, cu_seqlens_q, seq_lens):
        rows = slice(sequence.rows.start, sequence.rows.stop)
        by_query = deterministic or len(sequence.rows) * block_ids.shape[2] < QUERIES_A_BLOCK * len(sequence.pages)
        attend = _by_query if by_query else _by_block
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            ids = _distinct(block_ids[h, rows], sequence)  # [n, K]
            part = attend(q[rows, heads], k_cache, v_cache, h, ids, sequence, scale * k_scale)
            out[rows, heads], lse[rows, heads] = part[0] * v_scale, part[1]
    return out, lse


def _distinct(ids: Tensor, sequence: Packed) -> Tensor:
    """[n, K] int64, ascending: every visible block once; the number of the sequence's blocks for what doesn't count."""
    own = torch.arange(sequence.first_position, sequence.length)[: len(ids), None] // PAGE_SIZE
    nothing = len(sequence.pages)
    ids = ids.long()
    ids = ids.masked_fill((ids < 0) | (ids > own), nothing).sort(-1).values
    repeated = torch.zeros_like(ids, dtype=torch.bool)
    repeated[:, 1:] = ids[:, 1:] == ids[:, :-1]
    return ids.masked_fill(repeated, nothing)


def _by_block(q: Tensor, k_cache: Tensor, v_cache: Tensor, head: int, ids: Tensor, sequence: Packed, scale: float) -> tuple[Tensor, Tensor]:
    """out [n, G, D] and lse [n, G] of one key head."""
    tiles = [
        _tile_by_block(q[t : t + TILE], k_cache, v_cache, head, ids[t : t + TILE], sequence, sequence.first_position + t, scale)
        for t in range(0, len(q), TILE)
    ]
    return torch.cat([out for out, _ in tiles]), torch.cat([lse for _, lse in tiles])


def _tile_by_block(
    q: Tensor, k_cache: Tensor, v_cache: Tensor, head: int, ids: Tensor, sequence: Packed, first: int, scale: float
) -> tuple[Tensor, Tensor]:
    num_queries, group, dim = q.shape
    q = q.contiguous()
    sums = Accumulator(num_queries, group, dim, accumulate_dtype(q.dtype))
    blocks, order = ids.flatten().sort(stable=True)
    queries = order // ids.shape[1]  # those of one block ascend
    ends = torch.bincount(blocks, minlength=len(sequence.pages) + 1).cumsum(0).tolist()
    diagonal = causal_mask(0, PAGE_SIZE, PAGE_SIZE, q.dtype)
    for block in range(int(blocks[0]), len(sequence.pages)):
        chosen = queries[ends[block - 1] if block else 0 : ends[block]]
        if not len(chosen):
            continue
        valid = min(PAGE_SIZE, sequence.length - block * PAGE_SIZE)
        page = int(sequence.pages[block])
        keys, values = (head_of_page(cache, page, head, valid, q.dtype) for cache in (k_cache, v_cache))
        # Queries that stand inside the block come first, and see it only up to themselves.
        inside = int(torch.searchsorted(chosen, (block + 1) * PAGE_SIZE - first))
        for part, masked in ((chosen[:inside], True), (chosen[inside:], False)):
            if len(part):
                mask = diagonal[part + first - block * PAGE_SIZE].repeat_interleave(group, 0) if masked else None
                out, lse = fused(q.index_select(0, part).view(-1, dim), keys, values, scale, mask)
                sums.add(part, out.view(-1, group, dim), lse.view(-1, group))
    return sums.result()


def _by_query(q: Tensor, k_cache: Tensor, v_cache: Tensor, head: int, ids: Tensor, sequence: Packed, scale: float) -> tuple[Tensor, Tensor]:
    """out [n, G, D] and lse [n, G] of one key head."""
    num_queries, group, _ = q.shape
    num_keys = ids.shape[1] * PAGE_SIZE
    out = q.new_zeros(q.shape)
    lse = q.new_full((num_queries, group), -torch.inf, dtype=accumulate_dtype(q.dtype))
    pages = torch.cat([sequence.pages, sequence.pages[:1]])[ids]  # [n, K]; any page for what doesn't count
    for start in range(0, num_queries, max(1, GATHERED // max(num_keys, 1))):
        tile = slice(start, start + max(1, GATHERED // max(num_keys, 1)))
        position = sequence.first_position + torch.arange(num_queries)[tile]
        standing = (ids[tile, :, None] * PAGE_SIZE + torch.arange(PAGE_SIZE)).flatten(1)  # [n, K * P] position of each key
        hidden = standing > position[:, None]
        some = ~hidden.all(-1)
        keys, values = (
            cache[pages[tile], head].to(q.dtype).flatten(1, 2).masked_fill_(hidden[..., None], 0) for cache in (k_cache, v_cache)
        )  # [n, K * P, D]
        mask = torch.zeros(hidden.shape, dtype=q.dtype).masked_fill_(hidden & some[:, None], -torch.inf)
        part_out, part_lse = fused(q[tile].contiguous(), keys, values, scale, mask[:, None].expand(-1, group, -1))
        out[tile] = torch.where(some[:, None, None], part_out, 0)
        lse[tile] = torch.where(some[:, None], part_lse, -torch.inf)
    return out, lse

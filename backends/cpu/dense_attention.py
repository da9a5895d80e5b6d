"""dense_attention on the CPU: torch's fused attention, tile of queries by tile, over one key head's gathered pages.

The keys that a whole tile sees need no mask; the few that follow are masked, and both parts merge by their lse. Needs
2 * L * D elements of q's dtype for the longest sequence of L keys: 512 MiB in bf16 at M3's heads and 1M keys.
"""

import torch
from torch import Tensor

from m3_hw.backends.cpu._attention import Packed, causal_mask, fused, merge, over_all, packed
from m3_hw.spec import accumulate_dtype

TILE = 128
"""Queries of a tile: with M3's 16 heads a group, 2048 rows."""


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
    num_kv_heads, group = k_cache.shape[1], q.shape[1] // k_cache.shape[1]
    out = q.new_zeros(q.shape)
    lse = q.new_full(q.shape[:2], -torch.inf, dtype=accumulate_dtype(q.dtype))
    for sequence in packed(block_table, cu_seqlens_q, seq_lens):
        for h in range(num_kv_heads):
            heads = slice(h * group, (h + 1) * group)
            keys, values = (_gathered(cache, h, sequence, q.dtype) for cache in (k_cache, v_cache))
            for start in range(0, len(sequence.rows), TILE):
                rows = slice(sequence.rows.start + start, min(sequence.rows.start + start + TILE, sequence.rows.stop))
                part = _tile(q[rows, heads], keys, values, sequence.first_position + start, scale * k_scale)
                out[rows, heads], lse[rows, heads] = part[0] * v_scale, part[1]
    return out, lse


def _gathered(cache: Tensor, head: int, sequence: Packed, dtype: torch.dtype) -> Tensor:
    """[L, D]: one head's keys or values of a sequence, in order."""
    return cache[sequence.pages, head].flatten(0, 1)[: sequence.length].to(dtype)


def _tile(q: Tensor, keys: Tensor, values: Tensor, first: int, scale: float) -> tuple[Tensor, Tensor]:
    """Queries [n, G, D] that stand at first, first + 1, ...: out [n, G, D] and lse [n, G]."""
    num_queries, group, dim = q.shape
    rows, seen, last = q.reshape(-1, dim), first + 1, first + num_queries
    part = over_all(rows, keys[:seen], values[:seen], scale)
    if last > seen:  # row i also sees the i keys after `seen`; its own first row sees none, and is finished
        mask = causal_mask(0, num_queries - 1, num_queries - 1, q.dtype).repeat_interleave(group, 0)
        out, lse = fused(rows[group:], keys[seen:last], values[seen:last], scale, mask)
        rest = merge((part[0][group:], part[1][group:]), (out.to(part[0].dtype), lse))
        part = torch.cat([part[0][:group], rest[0]]), torch.cat([part[1][:group], rest[1]])
    return part[0].view(q.shape), part[1].view(num_queries, group)

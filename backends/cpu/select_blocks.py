"""select_blocks on the CPU: fp32 products by tiles of queries and keys, reduced at once to one score a block.

Never holds queries x keys: needs 4 * ROWS * KEYS bytes for a tile of products and 4 * ROWS * blocks for scores, 4 + 32 MiB
at 1M keys. Scores become integers that hold the whole order (forced, score, NaN, not visible), so that one `topk`
of integers breaks ties by the lower block.
"""

import torch
from torch import Tensor

from m3_hw.backends.cpu._attention import Packed, packed
from m3_hw.contract import PAGE_SIZE
from m3_hw.spec import accumulate_dtype

ROWS = 1024
"""Query rows (queries x index heads) of a tile."""
KEYS = 1024
"""Keys of a tile when it has ROWS rows; more when it has fewer."""


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
    num_tokens, num_heads, _ = index_q.shape
    ids = torch.full((num_heads, num_tokens, top_k), -1, dtype=torch.int32)
    tile = max(1, ROWS // max(num_heads, 1))
    for sequence in packed(block_table, cu_seqlens_q, seq_lens):
        for start in range(sequence.rows.start, sequence.rows.stop, tile):
            rows = slice(start, min(start + tile, sequence.rows.stop))
            position = sequence.first_position + torch.arange(start, rows.stop) - sequence.rows.start  # [n]
            scores = _block_scores(index_q[rows], index_k_cache, sequence, position)  # [Hi, n, blocks]
            order = _order(scores, position // PAGE_SIZE, local_blocks, init_blocks)
            chosen = _first(order, top_k)
            ids[:, rows, : chosen.shape[-1]] = chosen
    return ids


def _block_scores(query: Tensor, cache: Tensor, sequence: Packed, position: Tensor) -> Tensor:
    """[Hi, n, blocks]: the best product of each block with each query, over the keys that the query may see."""
    num_queries, num_heads, dim = query.shape
    acc = accumulate_dtype(query.dtype)
    flat_query = query.transpose(0, 1).to(acc).reshape(-1, dim)  # [Hi * n, Di]
    blocks = int(position[-1]) // PAGE_SIZE + 1
    scores = torch.full((num_heads, num_queries, blocks), -torch.inf, dtype=acc)
    step = max(1, KEYS * ROWS // max(len(flat_query), ROWS // 16) // PAGE_SIZE)  # blocks of a tile
    buffer = torch.empty(len(flat_query), step * PAGE_SIZE, dtype=acc)
    for start in range(0, blocks, step):
        pages = sequence.pages[start : min(start + step, blocks)]
        keys = cache[pages].to(acc).flatten(0, 1)  # [keys, Di]
        products = torch.mm(flat_query, keys.T, out=buffer if len(keys) == buffer.shape[1] else None)
        products = products.view(num_heads, num_queries, len(keys))
        if (start + len(pages)) * PAGE_SIZE > int(position[0]) + 1:  # some query doesn't see all of these keys
            hidden = torch.arange(start * PAGE_SIZE, start * PAGE_SIZE + len(keys)) > position[:, None]
            products.masked_fill_(hidden, -torch.inf)
        torch.amax(products.view(*products.shape[:2], -1, PAGE_SIZE), -1, out=scores[..., start : start + len(pages)])
    return scores


def _order(scores: Tensor, own: Tensor, local_blocks: int, init_blocks: int) -> Tensor:
    """Integers as large as the scores' bits, in the order of choice; the least one for blocks that can't be chosen.

    From the top: local blocks, initial blocks, scores, NaN.
    """
    bits = (scores + 0.0).view(torch.int64 if scores.dtype == torch.float64 else torch.int32)  # + 0.0: -0 becomes +0
    limits = torch.iinfo(bits.dtype)
    order = torch.where(bits < 0, bits ^ limits.max, bits)
    order.masked_fill_(scores.isnan(), limits.min + 1)
    block = torch.arange(scores.shape[-1])
    order[..., :init_blocks] = limits.max - 1
    order.masked_fill_((block > own[:, None] - local_blocks) & (block <= own[:, None]), limits.max)
    return order.masked_fill_(block > own[:, None], limits.min)


def _first(order: Tensor, top_k: int) -> Tensor:
    """[..., blocks] -> the first top_k blocks, equal ones by the lower block: ids ascending, then -1. [..., <= K]"""
    blocks = order.shape[-1]
    if order.dtype == torch.int32:  # One topk: the order in the high half, the lower block first in the low half.
        best = (order.long() * 2**32 + torch.arange(blocks, 0, -1)).topk(min(top_k, blocks), sorted=False).values
        ids, ranks = blocks - (best & (2**32 - 1)), best >> 32
    else:
        ids = order.argsort(dim=-1, descending=True, stable=True)[..., :top_k]
        ranks = order.gather(-1, ids)
    ids = ids.masked_fill(ranks == torch.iinfo(order.dtype).min, blocks).sort(-1).values
    return ids.masked_fill(ids == blocks, -1).int()

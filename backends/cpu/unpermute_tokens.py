"""unpermute_tokens on the CPU: a gather per slot, over tiles of tokens whose fp32 sums stay in the cache."""

import torch
from torch import Tensor

from m3_hw.ops.unpermute_tokens import row_of_slot
from m3_hw.spec import accumulate_dtype

TILE = 128
"""Tokens summed at once: 3 MiB of fp32 at M3's width."""


def unpermute_tokens(rows: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    row_of = row_of_slot(source).view(weights.shape)  # [T, A]
    missing = row_of < 0
    weights = weights.masked_fill(missing, 0)
    row_of = row_of.masked_fill(missing, 0)
    out = rows.new_empty((weights.shape[0], rows.shape[1]))
    for t in range(0, weights.shape[0], TILE):
        tile = slice(t, t + TILE)
        total = torch.zeros_like(out[tile], dtype=accumulate_dtype(rows.dtype))
        for a in range(weights.shape[1]):
            picked = rows.index_select(0, row_of[tile, a]).masked_fill_(missing[tile, a, None], 0)  # [TILE, H]
            total.addcmul_(picked, weights[tile, a, None])
        out[tile] = total
    return out

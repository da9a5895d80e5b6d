"""permute_tokens on the CPU: one counting pass, one sort of the ids, one gather of the rows that are kept."""

import torch
from torch import Tensor


def sort_by_expert(ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor]:
    """Flat indices [T*A] int64 of the ids, those of expert 0 first and dropped ones last, and offsets [E+1] int32."""
    dropped = (ids < 0) | (ids >= num_experts)
    experts = ids.masked_fill(dropped, num_experts).flatten()
    offsets = torch.zeros(num_experts + 1, dtype=torch.int32)
    torch.cumsum(torch.bincount(experts, minlength=num_experts + 1)[:num_experts], 0, out=offsets[1:])
    return torch.argsort(experts, stable=True), offsets


def permute_tokens(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    order, offsets = sort_by_expert(ids, num_experts)
    num_kept = int(offsets[-1])
    source = order.int()
    source[num_kept:] = -1
    rows = x.new_empty((ids.numel(), x.shape[1]))
    torch.index_select(x, 0, order[:num_kept] // ids.shape[1], out=rows[:num_kept])
    rows[num_kept:] = 0
    return rows, source, offsets

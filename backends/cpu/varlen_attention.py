"""varlen_attention on the CPU: torch's fused attention, sequence by sequence, heads as a batch."""

from itertools import pairwise

from torch import Tensor

from m3_hw.backends.cpu._attention import fused


def varlen_attention(
    q: Tensor, k: Tensor, v: Tensor, cu_seqlens: Tensor, *, scale: float, max_seqlen: int, deterministic: bool = False
) -> Tensor:
    out = q.new_zeros(q.shape)
    for start, end in pairwise(cu_seqlens.tolist()):
        if end > start:
            query, keys, values = (x[start:end].transpose(0, 1) for x in (q, k, v))  # [n, L, D]
            out[start:end] = fused(query, keys, values, scale)[0].transpose(0, 1)
    return out

"""What the CPU's attention operators share: torch's fused attention on tiles, and exact merging of partial softmaxes.

Query heads of one key head are folded into rows: [n, G, D] is [n * G, D], which the fused kernel runs at matrix speed.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from m3_hw.contract import PAGE_SIZE
from m3_hw.paged import num_blocks, sequences
from m3_hw.spec import accumulate_dtype

SPLIT = 2048
"""Keys of one part where few rows meet many keys: the fused kernel uses threads over rows, so parts become a batch."""
FEW_ROWS = 128
NARROW = 64
"""Head dimensions up to this are computed in fp32: few channels don't average out what bf16 probabilities lose."""


class Packed(NamedTuple):
    """One sequence of a batch with queries: query rows, where the first one stands, and the pages of its keys."""

    rows: range
    first_position: int
    length: int
    pages: Tensor  # [blocks] int64


def packed(block_table: Tensor, cu_seqlens_q: Tensor, seq_lens: Tensor) -> Iterator[Packed]:
    """The sequences of a batch that have queries."""
    for b, rows, first, length in sequences(cu_seqlens_q, seq_lens):
        yield Packed(rows, first, length, block_table[b, : num_blocks(length)].long())


def fused(q: Tensor, keys: Tensor, values: Tensor, scale: float, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Attention of q [..., n, D] over keys, values [..., m, D]: out [..., n, D] in q's dtype or wider, lse [..., n] fp32.

    mask [..., n, m] is added to the scores, in q's dtype.
    """
    batch, (n, dim) = q.shape[:-2], q.shape[-2:]
    dtype = accumulate_dtype(q.dtype) if dim <= NARROW else q.dtype
    q, keys, values = (x.to(dtype).reshape(-1, 1, *x.shape[-2:]).contiguous() for x in (q, keys, values))  # it reads past gaps
    mask = None if mask is None else mask.to(dtype).reshape(-1, 1, *mask.shape[-2:])
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(q, keys, values, 0.0, False, attn_mask=mask, scale=scale)
    lse = lse.reshape(-1, n)
    calls = (lse == 0).any(-1)
    if calls.any():  # 0 is what the kernel also says of rows whose every score is -inf: they weigh nothing
        scores = q[calls, 0].to(lse.dtype) @ keys[calls, 0].to(lse.dtype).mT + (0 if mask is None else mask[calls, 0])  # [c, n, m]
        lse[calls] = lse[calls].masked_fill(scores.amax(-1) == -torch.inf, -torch.inf)
    return out.reshape(*batch, n, dim), lse.reshape(*batch, n)


def over_all(q: Tensor, keys: Tensor, values: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Attention of q [n, D] over keys [m, D] that all its rows see: out [n, D] in fp32 or fp64, lse [n]."""
    acc = accumulate_dtype(q.dtype)
    parts = len(keys) // SPLIT if len(q) <= FEW_ROWS else 0
    if parts < 2:
        out, lse = fused(q, keys, values, scale)
        return out.to(acc), lse
    cut = parts * SPLIT
    split_keys, split_values = (x[:cut].view(parts, SPLIT, -1) for x in (keys, values))
    out, lse = fused(q.expand(parts, *q.shape), split_keys, split_values, scale)  # [parts, n, D], [parts, n]
    total = lse.logsumexp(0)
    merged = (out.to(acc) * _weight(lse, total)[..., None]).sum(0)
    return (merged, total) if cut == len(keys) else merge((merged, total), over_all(q, keys[cut:], values[cut:], scale))


def merge(a: tuple[Tensor, Tensor], b: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Attention over two sets of keys from that over each: out [n, D], lse [n]."""
    total = torch.logaddexp(a[1], b[1])
    return a[0] * _weight(a[1], total)[..., None] + b[0] * _weight(b[1], total)[..., None], total


def _weight(lse: Tensor, reference: Tensor) -> Tensor:
    """exp(lse - reference); 0 for what holds no key, whatever the reference."""
    return (lse - reference).exp().masked_fill_(lse == -torch.inf, 0)


def causal_mask(first: int, num_rows: int, num_keys: int, dtype: torch.dtype) -> Tensor:
    """[rows, keys] to add to scores: row i sees keys 0 .. first + i."""
    hidden = torch.arange(num_keys) > torch.arange(first, first + num_rows)[:, None]
    return torch.zeros(num_rows, num_keys, dtype=dtype).masked_fill_(hidden, -torch.inf)


def head_of_page(cache: Tensor, page: int, head: int, num_valid: int, dtype: torch.dtype) -> Tensor:
    """[P, D] of one page and head in `dtype`; zeros where nobody owns the slot, since 0 * NaN would be NaN."""
    tile = cache[page, head].to(dtype)
    if num_valid < PAGE_SIZE:
        tile = tile.clone()
        tile[num_valid:] = 0
    return tile


class Accumulator:
    """Sums of partial attention over disjoint keys for rows [n, G]: out = sum of w * part / sum of w, w = exp(lse - reference).

    The reference of a row is the first lse that it meets, moved only when a later one would grow past e^20: most
    parts are added by one `index_add_`.
    """

    MOST_GROWTH = 20.0

    def __init__(self, num_rows: int, group: int, dim: int, dtype: torch.dtype) -> None:
        self.sums = torch.zeros(num_rows, group, dim, dtype=dtype)
        self.weights = torch.zeros(num_rows, group, dtype=dtype)
        self.reference = torch.full((num_rows, group), -torch.inf, dtype=dtype)

    def add(self, rows: Tensor, out: Tensor, lse: Tensor) -> None:
        """Add out [m, G, D] with lse [m, G] to the rows [m], all different."""
        reference = self.reference.index_select(0, rows)
        grown = (lse - reference > self.MOST_GROWTH).any(-1)
        if grown.any():
            moved = rows[grown]
            higher = torch.maximum(reference[grown], lse[grown])
            shrink = (reference[grown] - higher).exp().nan_to_num_(0.0)  # -inf - -inf: nothing there yet
            self.sums[moved] *= shrink[..., None]
            self.weights[moved] *= shrink
            self.reference[moved] = higher
            reference[grown] = higher
        weight = _weight(lse, reference)
        self.weights.index_add_(0, rows, weight)
        self.sums.index_add_(0, rows, out.to(self.sums.dtype, copy=True).mul_(weight[..., None]))

    def result(self) -> tuple[Tensor, Tensor]:
        """out [n, G, D] and lse [n, G]; zeros and -inf for rows without a part."""
        empty = self.weights == 0
        out = self.sums.div_(self.weights.masked_fill(empty, 1)[..., None])
        return out, (self.weights.log() + self.reference).masked_fill(empty, -torch.inf)

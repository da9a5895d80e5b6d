"""rope on the CPU: two fused multiply-adds over tiles of tokens; channels R.. are copied as they are."""

import torch
from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.spec import accumulate_dtype


def rotate_into(out: Tensor, x: Tensor, cos: Tensor, sin: Tensor) -> None:
    """Rotate x [tokens, n, R], in the tables' dtype, into the first R channels of out."""
    half = cos.shape[1]
    first, second = x.chunk(2, dim=-1)  # [tokens, n, R/2]
    cos, sin = cos[:, None], sin[:, None]
    out[..., :half] = (first * cos).addcmul_(second, sin, value=-1)
    out[..., half : 2 * half] = (second * cos).addcmul_(first, sin)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    num_rotary = 2 * cos.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens in row_tiles(x.shape[0], x.shape[1] * num_rotary):
        rotate_into(out[tokens], x[tokens, :, :num_rotary].to(accumulate_dtype(x.dtype)), cos[tokens], sin[tokens])
    out[..., num_rotary:] = x[..., num_rotary:]
    return out

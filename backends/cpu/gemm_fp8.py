"""gemm_fp8 on the CPU: one fp32 product per tile of b, dequantised just before it."""

import torch
from torch import Tensor

from m3_hw.backends.cpu._tiles import ELEMENTS
from m3_hw.ops.quantize_fp8 import spread_scale


def gemm_fp8(a: Tensor, b: Tensor, a_scale: Tensor, b_scale: Tensor, *, out_dtype: torch.dtype) -> Tensor:
    wide_a = a.float().mul_(spread_scale(a_scale, *a.shape))  # [M, Kd]
    row_scale = spread_scale(b_scale, b.shape[0], b_scale.shape[1])  # [Nd, 1 or ceil(Kd/128)]
    out = torch.empty((a.shape[0], b.shape[0]), dtype=out_dtype)
    step = max(64, 4 * ELEMENTS // b.shape[1])  # rows of b: enough for the product to be efficient
    for n in range(0, b.shape[0], step):
        tile = b[n : n + step].float()  # [step, Kd]
        tile *= spread_scale(row_scale[n : n + step], *tile.shape)
        out[:, n : n + step] = wide_a @ tile.T
    return out

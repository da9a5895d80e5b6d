"""add_rms_norm on the CPU: the sum, then torch's fused norm over tiles of rows."""

import torch
import torch.nn.functional as F
from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.spec import accumulate_dtype


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    acc = accumulate_dtype(x.dtype)
    new_residual = torch.empty_like(x, memory_format=torch.contiguous_format)
    torch.add(x, residual, out=new_residual)
    y = torch.empty_like(new_residual)
    factor = 1 + weight.to(acc)
    sums, normed = new_residual.view(-1, factor.shape[0]), y.view(-1, factor.shape[0])
    for rows in row_tiles(*sums.shape):
        normed[rows] = F.rms_norm(sums[rows].to(acc), factor.shape, factor, eps)
    return y, new_residual

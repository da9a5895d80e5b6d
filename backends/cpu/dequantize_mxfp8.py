"""dequantize_mxfp8 on the CPU: bfloat16 holds both the values and the powers of two, so one product in it rounds once."""

import torch
from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.ops.dequantize_mxfp8 import GROUP


def dequantize_mxfp8(w: Tensor, scale: Tensor) -> Tensor:
    power = scale.view(torch.float8_e8m0fnu).to(torch.bfloat16)[..., None]  # [Nd, Kd/32, 1]
    groups = torch.empty((*scale.shape, GROUP), dtype=torch.bfloat16)  # [Nd, Kd/32, 32]
    for rows in row_tiles(*w.shape):
        torch.mul(w[rows].to(torch.bfloat16).reshape(groups[rows].shape), power[rows], out=groups[rows])
    return groups.view(w.shape)

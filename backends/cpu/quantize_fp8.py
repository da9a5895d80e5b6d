"""quantize_fp8 on the CPU: column by column of groups, once for the largest magnitudes and once to divide."""

import torch
import torch.nn.functional as F
from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.contract import FP8
from m3_hw.ops.quantize_fp8 import FP8_MAX, GROUP, spread_scale, to_fp8


def quantize_fp8(x: Tensor, *, granularity: str) -> tuple[Tensor, Tensor]:
    num_rows = x.shape[0]
    columns = torch.split(x, GROUP if granularity in ("group128", "block128") else x.shape[1], dim=1)
    largest = [torch.linalg.vector_norm(part, torch.inf, dim=1, dtype=torch.float32) for part in columns]
    amax = torch.stack(largest, dim=1)  # [M, groups]
    if granularity == "block128":
        amax = F.pad(amax, (0, 0, 0, -num_rows % GROUP)).view(-(-num_rows // GROUP), GROUP, len(columns)).amax(1)
    elif granularity == "tensor":
        amax = F.pad(amax, (0, 0, 0, 1)).amax(0, keepdim=True)  # a row of zeros, for a tensor without rows
    scale = amax / FP8_MAX
    scale.masked_fill_(scale == 0, 1)
    row_scale = spread_scale(scale, num_rows, len(columns))  # [M, groups]
    y = torch.empty_like(x, dtype=FP8, memory_format=torch.contiguous_format)
    for group, part in enumerate(columns):
        out = y[:, group * GROUP : group * GROUP + part.shape[1]]
        for rows in row_tiles(*part.shape):
            out[rows] = to_fp8(part[rows].float(), row_scale[rows, group, None])
    return y, scale

"""qk_norm_rope on the CPU: torch's fused norm and the rotation on the same fp32 tile of tokens."""

import torch
import torch.nn.functional as F
from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.backends.cpu.rope import rotate_into
from m3_hw.spec import accumulate_dtype


def qk_norm_rope(x: Tensor, weight: Tensor, cos: Tensor, sin: Tensor, eps: float) -> Tensor:
    acc = accumulate_dtype(x.dtype)
    factor = 1 + weight.to(acc)
    num_rotary = 2 * cos.shape[1]
    out = torch.empty_like(x, memory_format=torch.contiguous_format)
    for tokens in row_tiles(x.shape[0], x.shape[1] * x.shape[2]):
        normed = F.rms_norm(x[tokens].to(acc), factor.shape, factor, eps)  # [tokens, n, D]
        rotate_into(out[tokens], normed[..., :num_rotary], cos[tokens], sin[tokens])
        out[tokens, :, num_rotary:] = normed[..., num_rotary:]
    return out

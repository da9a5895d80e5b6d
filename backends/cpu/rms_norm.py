"""rms_norm on the CPU: torch's fused kernel, which accumulates in fp32."""

import torch.nn.functional as F
from torch import Tensor

from m3_hw.spec import accumulate_dtype


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    acc = accumulate_dtype(x.dtype)
    return F.rms_norm(x.to(acc), weight.shape, 1 + weight.to(acc), eps).to(x.dtype).contiguous()

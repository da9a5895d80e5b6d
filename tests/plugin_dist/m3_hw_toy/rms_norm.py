"""rms_norm of the toy backend: refuses fp64 and rows wider than it was built for."""

from collections.abc import Iterator

import torch
from torch import Tensor

MAX_WIDTH = 8192


def unsupported_reasons(x: Tensor, weight: Tensor, eps: float) -> Iterator[str]:
    if x.dtype == torch.float64:
        yield "x has dtype float64; supported: float32, bfloat16, float16"
    if x.shape[-1] > MAX_WIDTH:
        yield f"x has rows of {x.shape[-1]}; supported: up to {MAX_WIDTH}"


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.float()
    return (wide / (wide.square().mean(-1, keepdim=True) + eps).sqrt() * (1 + weight.float())).to(x.dtype).contiguous()

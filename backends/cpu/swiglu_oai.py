"""swiglu_oai on the CPU: in-place passes over fp32 tiles of rows that stay in the cache."""

from torch import Tensor

from m3_hw.backends.cpu._tiles import row_tiles
from m3_hw.spec import accumulate_dtype


def swiglu_oai(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    acc = accumulate_dtype(gate_up.dtype)
    out = gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2))
    for rows in row_tiles(*out.shape):
        gate, up = gate_up[rows].chunk(2, dim=-1)  # [rows, I]
        gate = gate.to(acc, copy=True).clamp_(max=limit)
        up = up.to(acc, copy=True).clamp_(-limit, limit).add_(1).mul_(gate)
        out[rows] = up.mul_(gate.mul_(alpha).sigmoid_())
    return out

"""moe_experts on the CPU: expert after expert, reading only the weights of those with rows.

The outputs wait in one [T*A, H] buffer for the sum, so that its order is the order of the slots wherever an expert lies.
"""

from itertools import pairwise

import torch
from torch import Tensor

from m3_hw.backends.cpu.permute_tokens import sort_by_expert
from m3_hw.backends.cpu.swiglu_oai import swiglu_oai
from m3_hw.backends.cpu.unpermute_tokens import unpermute_tokens
from m3_hw.spec import accumulate_dtype

NARROW = 64
"""Experts of up to so many channels are computed in fp32: few don't average out what the rounding of SwiGLU loses.
So are all in fp16, which doesn't hold every gate, and has no fast product on most CPUs."""


def moe_experts(x: Tensor, weights: Tensor, ids: Tensor, w_gate_up: Tensor, w_down: Tensor, *, alpha: float, limit: float) -> Tensor:
    source, offsets = sort_by_expert(ids, w_gate_up.shape[0])
    bounds = offsets.tolist()
    dtype = x.dtype
    wide = accumulate_dtype(dtype)
    rows = x.new_empty((ids.numel(), x.shape[1]), dtype=wide)
    if w_down.shape[2] <= NARROW or dtype == torch.float16:
        x = x.to(wide)
    for e, (start, end) in enumerate(pairwise(bounds)):
        if end > start:
            gate_up = _wide_product(x.index_select(0, source[start:end] // ids.shape[1]), w_gate_up[e].to(x.dtype))  # [n, 2*I]
            rows[start:end] = _wide_product(swiglu_oai(gate_up, alpha, limit).to(x.dtype), w_down[e].to(x.dtype))
    source[bounds[-1] :] = -1
    return unpermute_tokens(rows, source, weights).to(dtype)


def _wide_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight^T; of bf16 in fp32: bf16 that is rounded at gate, up, SwiGLU, each slot and the sum strays by more than 4e-3.

    torch has no bf16 product with an fp32 result on the CPU. `addmm` adds before it rounds, so a second product
    gives the part that the first one's rounding lost: faster than a copy of the weight in fp32.
    """
    product = x @ weight.T
    if x.dtype != torch.bfloat16:
        return product
    lost = torch.addmm(-product, x, weight.T).float()
    return product.float().add_(lost.nan_to_num_(0, 0, 0))  # inf - inf has lost nothing

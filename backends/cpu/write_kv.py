"""write_kv on the CPU: one scatter a cache; fp8 values are quantised before it, in whole tensors."""

import torch
from torch import Tensor

from m3_hw.contract import FP8, PAGE_SIZE
from m3_hw.ops.quantize_fp8 import to_fp8


def _stored(values: Tensor, cache: Tensor, scale: float) -> Tensor:
    return to_fp8(values.float(), torch.tensor(scale, dtype=torch.float32)) if cache.dtype == FP8 else values


def write_kv(
    k: Tensor,
    v: Tensor,
    index_k: Tensor | None,
    k_cache: Tensor,
    v_cache: Tensor,
    index_k_cache: Tensor | None,
    slots: Tensor,
    *,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    index_k_scale: float = 1.0,
) -> None:
    rows = (slots >= 0).nonzero().flatten()
    kept = slots.index_select(0, rows).long()
    page, offset = kept // PAGE_SIZE, kept % PAGE_SIZE
    for values, cache, scale in ((k, k_cache, k_scale), (v, v_cache, v_scale)):
        cache[page, :, offset] = _stored(values.index_select(0, rows), cache, scale)  # [kept, Hkv, D]
    if index_k is not None and index_k_cache is not None:
        index_k_cache[page, offset] = _stored(index_k.index_select(0, rows), index_k_cache, index_k_scale)  # [kept, Di]

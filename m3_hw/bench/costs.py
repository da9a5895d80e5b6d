"""Bytes that a call must move and operations that it must do, whatever the implementation: a formula per operator.

Bytes: every input that is needed read once, every output written once. Operations: 2 for a multiply and an add of
a matrix product; those of elementwise operators are not counted, since bytes bound them.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from m3_hw.contract import PAGE_SIZE
from m3_hw.paged import num_blocks, sequences
from m3_hw.spec import Call


class Cost(NamedTuple):
    """Least bytes and operations of a call; dtype: what the operations are done in, if not the data's."""

    bytes: float
    operations: float = 0.0
    dtype: str | None = None


def cost(op: str, call: Call) -> Cost:
    """What a call of an operator costs at least."""
    return _COSTS[op](call)


def _bytes(*tensors: Tensor) -> int:
    return sum(int(tensor.nbytes) for tensor in tensors)


def _one_to_one(call: Call) -> Cost:
    """Every input read, an output as large as the first input written."""
    first, *rest = (value for value in call.values() if isinstance(value, Tensor))
    return Cost(_bytes(first, first, *rest))


def _add_rms_norm(call: Call) -> Cost:
    return Cost(4 * call["x"].nbytes + call["weight"].nbytes)


def _swiglu_oai(call: Call) -> Cost:
    return Cost(1.5 * call["gate_up"].nbytes)


def _write_kv(call: Call) -> Cost:
    written = sum(call[name].numel() * call[f"{name}_cache"].element_size() for name in ("k", "v", "index_k") if call[name] is not None)
    return Cost(_bytes(*(call[name] for name in ("k", "v", "index_k", "slots") if call[name] is not None)) + written)


def _positions(call: Call) -> Tensor:
    """[T] position of every query of the batch."""
    parts = [torch.arange(first, length) for _, _, first, length in sequences(call["cu_seqlens_q"].cpu(), call["seq_lens"].cpu())]
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.int64)


def _key_bytes(call: Call, *caches: str) -> int:
    """Bytes of the batch's keys in its caches, each read once."""
    num_keys = int(call["seq_lens"].sum())
    return sum(num_keys * call[name][0].nbytes // PAGE_SIZE for name in caches)


def _select_blocks(call: Call) -> Cost:
    index_q = call["index_q"]
    num_pairs = int((_positions(call) + 1).sum())
    ids = 4 * index_q.shape[1] * index_q.shape[0] * call["top_k"]
    return Cost(index_q.nbytes + _key_bytes(call, "index_k_cache") + ids, 2.0 * index_q.shape[1] * index_q.shape[2] * num_pairs)


def _attention_io(call: Call) -> int:
    """Bytes of q, out and lse."""
    q = call["q"]
    return 2 * _bytes(q) + 4 * int(q.shape[0] * q.shape[1])


def _sparse_attention(call: Call) -> Cost:
    """Counts the keys that the listed blocks show, and every (sequence, kv head, block) that is listed once."""
    q, cache, ids = call["q"], call["k_cache"], call["block_ids"].cpu().long()  # ids [Hkv, T, K]
    positions = _positions(call)
    ids = ids[:, : positions.shape[0]]
    own = positions // PAGE_SIZE
    inner, diagonal = ((ids >= 0) & (ids < own[:, None])).sum((0, 2)), (ids == own[:, None]).sum((0, 2))
    num_pairs = int((inner * PAGE_SIZE + diagonal * (positions % PAGE_SIZE + 1)).sum())  # over kv heads
    listed = 0
    for _, rows, _, length in sequences(call["cu_seqlens_q"].cpu(), call["seq_lens"].cpu()):
        for head in ids[:, rows.start : rows.stop]:
            listed += int(torch.bincount(head[head >= 0], minlength=num_blocks(length)).count_nonzero())
    tile = PAGE_SIZE * cache.shape[3] * cache.element_size()
    return Cost(_attention_io(call) + ids.numel() * 4 + 2 * listed * tile, 4.0 * q.shape[1] // cache.shape[1] * q.shape[2] * num_pairs)


def _dense_attention(call: Call) -> Cost:
    q = call["q"]
    num_pairs = int((_positions(call) + 1).sum())
    return Cost(_attention_io(call) + _key_bytes(call, "k_cache", "v_cache"), 4.0 * q.shape[1] * q.shape[2] * num_pairs)


def _varlen_attention(call: Call) -> Cost:
    q = call["q"]
    num_pairs = int(call["cu_seqlens"].diff().long().square().sum())
    return Cost(_bytes(q, q, call["k"], call["v"]), 4.0 * q.shape[1] * q.shape[2] * num_pairs)


def _route_tokens(call: Call) -> Cost:
    return Cost(_bytes(call["logits"], call["bias"]) + 8 * call["logits"].shape[0] * call["top_k"])


def _permute_tokens(call: Call) -> Cost:
    x, ids = call["x"], call["ids"]
    return Cost(x.nbytes * (1 + ids.shape[1]) + 2 * ids.nbytes)


def _unpermute_tokens(call: Call) -> Cost:
    rows, weights = call["rows"], call["weights"]
    return Cost(rows.nbytes * (1 + 1 / weights.shape[1]) + _bytes(call["source"], weights))


def _grouped_gemm(call: Call) -> Cost:
    rows, weight = call["rows"], call["weight"]
    touched = int((call["offsets"].diff() > 0).sum())
    out = rows.shape[0] * weight.shape[1]
    return Cost(rows.nbytes + touched * weight[0].nbytes + out * rows.element_size(), 2.0 * out * rows.shape[1])


def _moe_experts(call: Call) -> Cost:
    x, ids, up, down = (call[name] for name in ("x", "ids", "w_gate_up", "w_down"))
    kept = ids[(ids >= 0) & (ids < up.shape[0])]
    touched = int(kept.unique().numel())
    weights = touched * (up[0].nbytes + down[0].nbytes)
    return Cost(2 * x.nbytes + weights, 2.0 * kept.numel() * (up[0].numel() + down[0].numel()))


def _quantize_fp8(call: Call) -> Cost:
    return Cost(call["x"].nbytes + call["x"].numel())


def _gemm_fp8(call: Call) -> Cost:
    a, b = call["a"], call["b"]
    out = a.shape[0] * b.shape[0]
    moved = _bytes(a, b, call["a_scale"], call["b_scale"]) + out * call["out_dtype"].itemsize
    return Cost(moved, 2.0 * out * a.shape[1], "float8_e4m3fn")


def _dequantize_mxfp8(call: Call) -> Cost:
    return Cost(_bytes(call["w"], call["scale"]) + 2 * call["w"].numel())


_COSTS: dict[str, Callable[[Call], Cost]] = {
    "add_rms_norm": _add_rms_norm,
    "dense_attention": _dense_attention,
    "dequantize_mxfp8": _dequantize_mxfp8,
    "gemm_fp8": _gemm_fp8,
    "grouped_gemm": _grouped_gemm,
    "moe_experts": _moe_experts,
    "permute_tokens": _permute_tokens,
    "qk_norm_rope": _one_to_one,
    "quantize_fp8": _quantize_fp8,
    "rms_norm": _one_to_one,
    "rope": _one_to_one,
    "route_tokens": _route_tokens,
    "select_blocks": _select_blocks,
    "sparse_attention": _sparse_attention,
    "swiglu_oai": _swiglu_oai,
    "unpermute_tokens": _unpermute_tokens,
    "varlen_attention": _varlen_attention,
    "write_kv": _write_kv,
}

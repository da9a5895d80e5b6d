"""What each operator is compared with: the usual torch formulation of the same work, its preparation not timed."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from m3_hw.bench.timing import Run
from m3_hw.contract import FP8, PAGE_SIZE
from m3_hw.errors import NotSupportedError
from m3_hw.paged import num_blocks, sequences
from m3_hw.spec import Call

QUERY_TILE = 256
"""Queries whose scores the selection baseline holds at once."""


class Baseline(NamedTuple):
    """A torch formulation, ready to run."""

    name: str
    run: Run


def baseline(op: str, call: Call) -> Baseline:
    """The baseline of a call.

    Raises:
        NotSupportedError: torch has no such formulation on the call's device.
    """
    return _BASELINES[op](call)


def _rms_norm(call: Call) -> Baseline:
    x, weight, eps = call["x"], 1 + call["weight"], call["eps"]
    return Baseline("F.rms_norm", lambda: F.rms_norm(x, weight.shape, weight, eps))


def _add_rms_norm(call: Call) -> Baseline:
    x, residual, weight, eps = call["x"], call["residual"], 1 + call["weight"], call["eps"]

    def run() -> Any:
        total = x + residual
        return F.rms_norm(total, weight.shape, weight, eps), total

    return Baseline("add, F.rms_norm", run)


def _rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """[T, n, D] by tables that span the rotated channels, [T, 1, R], as transformers does."""
    rotary = x[..., : cos.shape[-1]]
    first, second = rotary.chunk(2, dim=-1)
    return torch.cat([rotary * cos + torch.cat([-second, first], dim=-1) * sin, x[..., cos.shape[-1] :]], dim=-1)


def _tables(call: Call) -> tuple[Tensor, Tensor]:
    cos, sin = (torch.cat([call[name]] * 2, dim=-1)[:, None].to(call["x"].dtype) for name in ("cos", "sin"))
    return cos, sin


def _rope(call: Call) -> Baseline:
    x, (cos, sin) = call["x"], _tables(call)
    return Baseline("rotate_half", lambda: _rotate(x, cos, sin))


def _qk_norm_rope(call: Call) -> Baseline:
    x, weight, eps, (cos, sin) = call["x"], 1 + call["weight"], call["eps"], _tables(call)
    return Baseline("F.rms_norm, rotate_half", lambda: _rotate(F.rms_norm(x, weight.shape, weight, eps), cos, sin))


def _gate(gate_up: Tensor, alpha: float, limit: float) -> Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def _swiglu_oai(call: Call) -> Baseline:
    return Baseline("clamp, sigmoid", lambda: _gate(**call))


def _write_kv(call: Call) -> Baseline:
    slots = call["slots"].long()
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE

    def run() -> Any:
        for name in ("k", "v"):
            cache = call[f"{name}_cache"]
            cache.transpose(1, 2)[page, offset] = call[name].to(cache.dtype)  # [N, P, Hkv, D]
        if call["index_k"] is not None:
            call["index_k_cache"][page, offset] = call["index_k"].to(call["index_k_cache"].dtype)

    return Baseline("index_put", run)


def _contiguous(cache: Tensor, table: Tensor, length: int) -> Tensor:
    """A sequence's keys of a paged cache [N, Hkv, P, D], one after the other: [Hkv, length, D]."""
    return cache[table[: num_blocks(length)].long()].transpose(0, 1).flatten(1, 2)[:, :length].contiguous()


def _dense_attention(call: Call) -> Baseline:
    """Causal attention on contiguous keys: what stands before the queries unmasked, then the queries' own square."""
    q, scale = call["q"], call["scale"]
    attend = {"cpu": _attend_on_cpu, "cuda": _attend_on_cuda}.get(q.device.type)
    if attend is None:
        raise NotSupportedError(f"no dense attention baseline on {q.device.type}; accepted: cpu, cuda")
    batch = [
        (
            q[rows.start : rows.stop].transpose(0, 1).contiguous(),  # [Hq, T, D]
            *(_contiguous(call[name].to(q.dtype), call["block_table"][seq], length) for name in ("k_cache", "v_cache")),
            first,
        )
        for seq, rows, first, length in sequences(call["cu_seqlens_q"], call["seq_lens"])
    ]

    def run() -> Any:
        return [_causal(attend, queries, keys, values, first, scale) for queries, keys, values, first in batch]

    return Baseline("causal SDPA, every key", run)


Attend = Callable[[Tensor, Tensor, Tensor, bool, float], tuple[Tensor, Tensor]]
"""q [Hq, T, D] over k and v [Hkv, S, D], causal or not -> out [Hq, T, D], lse [Hq, T]."""


def _causal(attend: Attend, q: Tensor, k: Tensor, v: Tensor, first: int, scale: float) -> Tensor:
    """Queries at positions first .. over k and v. No mask is ever made; two parts merge by their lse."""
    if q.shape[1] == 1:
        return attend(q, k, v, False, scale)[0]
    own, own_lse = attend(q, k[:, first:], v[:, first:], True, scale)
    if first == 0:
        return own
    before, before_lse = attend(q, k[:, :first], v[:, :first], False, scale)
    return torch.lerp(own, before, torch.sigmoid(before_lse - own_lse)[..., None].to(own.dtype))


def _attend_on_cpu(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """A group of heads as more queries of its kv head where there is no mask, which is faster; else K and V expanded."""
    num_heads, num_queries, dim = q.shape
    group = num_heads // k.shape[0]
    heads, copies = (k.shape[0], group) if causal else (k.shape[0], 1)
    grouped = q.reshape(heads, copies, -1, dim)
    keys, values = (x[:, None].expand(heads, copies, *x.shape[1:]) for x in (k, v))
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(grouped, keys, values, 0.0, causal, scale=scale)
    return out.reshape(q.shape), lse.reshape(num_heads, num_queries)


def _attend_on_cuda(q: Tensor, k: Tensor, v: Tensor, causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    """cuDNN, the fastest that torch has on Hopper; it takes grouped heads as they are."""
    attend = torch.ops.aten._scaled_dot_product_cudnn_attention
    out, lse, *_ = attend(q[None], k[None], v[None], None, True, 0.0, causal, False, scale=scale)
    return out[0], lse.reshape(q.shape[:2])


def _select_blocks(call: Call) -> Baseline:
    """Scores by matmul, causal mask, maximum per block, topk; a tile of queries at a time."""
    index_q, cache = call["index_q"], call["index_k_cache"]
    batch = [
        (index_q[rows.start : rows.stop].transpose(0, 1), cache[call["block_table"][seq, : num_blocks(length)].long()].flatten(0, 1), first)
        for seq, rows, first, length in sequences(call["cu_seqlens_q"], call["seq_lens"])
    ]

    def run() -> Any:
        return [
            _top_blocks(queries[:, t : t + QUERY_TILE], keys.to(index_q.dtype), first + t, call["top_k"])
            for queries, keys, first in batch
            for t in range(0, queries.shape[1], QUERY_TILE)
        ]

    return Baseline("matmul, amax, topk", run)


def _top_blocks(queries: Tensor, keys: Tensor, first: int, top_k: int) -> Tensor:
    positions = torch.arange(first, first + queries.shape[1], device=queries.device)[:, None]  # [t, 1]
    scores = (queries @ keys.T).float()  # [Hi, t, S]
    scores.masked_fill_(torch.arange(keys.shape[0], device=queries.device) > positions, -torch.inf)
    best = scores.view(*scores.shape[:2], -1, PAGE_SIZE).amax(-1)  # [Hi, t, blocks]
    best.scatter_(-1, (positions // PAGE_SIZE).expand(*best.shape[:2], 1), torch.inf)
    ids: Tensor = best.topk(min(top_k, best.shape[-1]), dim=-1).indices.sort(-1).values
    return ids


def _varlen_attention(call: Call) -> Baseline:
    bounds, scale = list(pairwise(call["cu_seqlens"].tolist())), call["scale"]
    batch = [[call[name][a:b].transpose(0, 1)[None].contiguous() for name in ("q", "k", "v")] for a, b in bounds if b > a]
    return Baseline("SDPA per image", lambda: [F.scaled_dot_product_attention(q, k, v, scale=scale) for q, k, v in batch])


def _route_tokens(call: Call) -> Baseline:
    logits, bias, top_k, scale = call["logits"], call["bias"], call["top_k"], call["scale"]

    def run() -> Any:
        scores = torch.sigmoid(logits.float())
        ids = (scores + bias).topk(top_k, dim=-1).indices
        weights = scores.gather(-1, ids)
        return weights / weights.sum(-1, keepdim=True) * scale, ids.int()

    return Baseline("sigmoid, topk", run)


def _permute_tokens(call: Call) -> Baseline:
    x, ids, num_experts = call["x"], call["ids"], call["num_experts"]

    def run() -> Any:
        flat = ids.flatten()
        order = flat.argsort(stable=True)
        return x[order // ids.shape[1]], order, torch.bincount(flat, minlength=num_experts).cumsum(0)

    return Baseline("argsort, index", run)


def _unpermute_tokens(call: Call) -> Baseline:
    rows, source, weights = call["rows"], call["source"].long(), call["weights"]

    def run() -> Any:
        weighted = rows * weights.flatten()[source, None]
        out = torch.zeros(weights.shape[0], rows.shape[1], dtype=torch.float32, device=rows.device)
        return out.index_add_(0, source // weights.shape[1], weighted.float()).to(rows.dtype)

    return Baseline("multiply, index_add", run)


def _grouped_gemm(call: Call) -> Baseline:
    rows, weight, offsets = call["rows"], call["weight"], call["offsets"]
    if rows.device.type == "cuda" and rows.dtype == torch.bfloat16:
        return Baseline("torch._grouped_mm", lambda: torch._grouped_mm(rows, weight.mT, offs=offsets[1:]))
    bounds = list(enumerate(pairwise(offsets.tolist())))
    return Baseline("F.linear per expert", lambda: torch.cat([F.linear(rows[a:b], weight[e]) for e, (a, b) in bounds]))


def _moe_experts(call: Call) -> Baseline:
    x, weights, ids, up, down = (call[name] for name in ("x", "weights", "ids", "w_gate_up", "w_down"))
    if x.device.type == "cuda" and x.dtype == torch.bfloat16:
        return Baseline("two torch._grouped_mm", _grouped_experts(call))

    def run() -> Any:
        out = torch.zeros_like(x)
        for e in range(up.shape[0]):
            token, slot = (ids == e).nonzero(as_tuple=True)
            if token.numel():
                hidden = _gate(F.linear(x[token], up[e]), call["alpha"], call["limit"])
                out.index_add_(0, token, F.linear(hidden, down[e]) * weights[token, slot, None].to(x.dtype))
        return out

    return Baseline("F.linear per expert", run)


def _grouped_experts(call: Call) -> Run:
    """The two products alone, on rows that lie sorted already: less than the whole operator."""
    x, ids, up, down = (call[name] for name in ("x", "ids", "w_gate_up", "w_down"))
    flat = ids.flatten()
    rows = x[flat.argsort(stable=True) // ids.shape[1]]
    ends = torch.bincount(flat, minlength=up.shape[0]).cumsum(0).int()
    hidden = torch.randn(rows.shape[0], down.shape[2], dtype=x.dtype, device=x.device)

    def run() -> Any:
        return torch._grouped_mm(rows, up.mT, offs=ends), torch._grouped_mm(hidden, down.mT, offs=ends)

    return run


def _quantize_fp8(call: Call) -> Baseline:
    x = call["x"]
    rows, columns = {"tensor": tuple(x.shape), "row": (1, x.shape[1]), "group128": (1, 128), "block128": (128, 128)}[call["granularity"]]

    def run() -> Any:
        tiles = x.float().view(x.shape[0] // rows, rows, x.shape[1] // columns, columns)
        scale = tiles.abs().amax((1, 3), keepdim=True) / torch.finfo(FP8).max
        scale = torch.where(scale == 0, 1.0, scale)
        return (tiles / scale).to(FP8).view(x.shape), scale[:, 0, :, 0]

    return Baseline("amax, divide, cast", run)


def _gemm_fp8(call: Call) -> Baseline:
    a, b, out_dtype = call["a"], call["b"], call["out_dtype"]
    if a.device.type == "cuda":
        one = torch.ones((), device=a.device)
        return Baseline("torch._scaled_mm", lambda: torch._scaled_mm(a, b.T, one, one, out_dtype=out_dtype, use_fast_accum=True))
    wide_a, wide_b = a.to(out_dtype), b.to(out_dtype)
    return Baseline("matmul on dequantised", lambda: wide_a @ wide_b.T)


def _dequantize_mxfp8(call: Call) -> Baseline:
    w, scale = call["w"], call["scale"]

    def run() -> Any:
        factors = torch.exp2(scale.float() - 127)
        return (w.float().view(*scale.shape, 32) * factors[..., None]).flatten(1).bfloat16()

    return Baseline("exp2, multiply", run)


_BASELINES: dict[str, Callable[[Call], Baseline]] = {
    "add_rms_norm": _add_rms_norm,
    "dense_attention": _dense_attention,
    "dequantize_mxfp8": _dequantize_mxfp8,
    "gemm_fp8": _gemm_fp8,
    "grouped_gemm": _grouped_gemm,
    "moe_experts": _moe_experts,
    "permute_tokens": _permute_tokens,
    "qk_norm_rope": _qk_norm_rope,
    "quantize_fp8": _quantize_fp8,
    "rms_norm": _rms_norm,
    "rope": _rope,
    "route_tokens": _route_tokens,
    "select_blocks": _select_blocks,
    "sparse_attention": _dense_attention,
    "swiglu_oai": _swiglu_oai,
    "unpermute_tokens": _unpermute_tokens,
    "varlen_attention": _varlen_attention,
    "write_kv": _write_kv,
}

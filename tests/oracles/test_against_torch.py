"""Every operator against plain torch in fp64 on the same inputs, by another formula than the reference's where there is one."""

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import m3_hw

FP8 = torch.float8_e4m3fn
LIMITS = {torch.float64: 1e-13, torch.float32: 2e-6, torch.float16: 1e-3, torch.bfloat16: 4e-3}
dtypes = pytest.mark.parametrize("dtype", list(LIMITS), ids=lambda dtype: str(dtype).removeprefix("torch."))


def assert_near(actual: Tensor, expected: Tensor, limit: float | None = None) -> None:
    """||actual - expected|| within the limit of actual's dtype, as a share of ||expected|| in fp64."""
    assert actual.shape == expected.shape
    error = float((actual.double() - expected).norm() / expected.norm())
    assert error <= (limit or LIMITS[actual.dtype]), f"rel_l2 {error:.3g}"


def wide(dtype: torch.dtype) -> torch.dtype:
    """Of what doesn't follow the data's dtype: router bias, weights, rope tables."""
    return torch.float64 if dtype == torch.float64 else torch.float32


@pytest.fixture
def normal(random: torch.Generator) -> Callable[..., Tensor]:
    """Normally distributed values: normal(dtype, *shape)."""
    return lambda dtype, *shape: torch.randn(shape, generator=random, dtype=torch.float64).to(dtype)


Normal = Callable[..., Tensor]


def angles(num_tokens: int, num_pairs: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """cos, sin, and the unit complex numbers that they are the parts of, [T, R/2] each."""
    phase = torch.arange(num_tokens, dtype=torch.float64)[:, None] * 0.7 ** torch.arange(num_pairs)
    cos, sin = phase.cos().to(wide(dtype)), phase.sin().to(wide(dtype))
    return cos, sin, torch.complex(cos.double(), sin.double())


def rotated(x: Tensor, turn: Tensor) -> Tensor:
    """x [T, n, D] fp64 with channel pairs (i, i + R/2) multiplied as complex numbers."""
    pairs = turn.shape[-1]
    z = torch.complex(x[..., :pairs], x[..., pairs : 2 * pairs]) * turn[:, None]
    return torch.cat((z.real, z.imag, x[..., 2 * pairs :]), dim=-1)


@dtypes
def test_norms(dtype: torch.dtype, normal: Normal) -> None:
    x, residual, weight = normal(dtype, 7, 96), normal(dtype, 7, 96), normal(dtype, 96)
    assert_near(m3_hw.rms_norm(x, weight, 1e-6), F.rms_norm(x.double(), (96,), 1 + weight.double(), 1e-6))
    y, total = m3_hw.add_rms_norm(x, residual, weight, 1e-6)
    assert_near(total, x.double() + residual.double())
    assert_near(y, F.rms_norm(total.double(), (96,), 1 + weight.double(), 1e-6))


@dtypes
def test_rope(dtype: torch.dtype, normal: Normal) -> None:
    x, weight = normal(dtype, 9, 3, 32), normal(dtype, 32)
    cos, sin, turn = angles(9, 8, dtype)
    assert_near(m3_hw.rope(x, cos, sin), rotated(x.double(), turn))
    normed = F.rms_norm(x.double(), (32,), 1 + weight.double(), 1e-6)
    assert_near(m3_hw.qk_norm_rope(x, weight, cos, sin, 1e-6), rotated(normed, turn))


@dtypes
def test_swiglu(dtype: torch.dtype, normal: Normal) -> None:
    gate_up = normal(dtype, 11, 64) * 5
    gate, up = gate_up.double().split(32, dim=-1)
    expected = (up.clamp(-7, 7) + 1) * F.silu(1.702 * gate.clamp(max=7)) / 1.702
    assert_near(m3_hw.swiglu_oai(gate_up, 1.702, 7.0), expected)


def visible(queries: tuple[int, ...], lengths: tuple[int, ...], b: int) -> Tensor:
    """[queries, keys] of a sequence: True where a query may look."""
    positions = torch.arange(lengths[b] - queries[b], lengths[b])
    return torch.arange(lengths[b]) <= positions[:, None]


def attention(q: Tensor, k: Tensor, v: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """out and lse [T, Hq, ...] in fp64 of q [T, Hq, D] over k and v [keys, Hkv, D]; mask [T, keys] or [Hq, T, keys]."""
    q, k, v = (x.double().transpose(0, 1) for x in (q, k, v))
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
    scores = q @ k.repeat_interleave(q.shape[0] // k.shape[0], 0).mT / q.shape[-1] ** 0.5
    return out.transpose(0, 1), scores.masked_fill(~mask, -torch.inf).logsumexp(-1).T


QUERIES, LENGTHS = (5, 40), (400, 290)


@pytest.fixture
def batch(normal: Normal, paginate: Callable[..., Any], packed: Callable[..., Any]) -> Callable[[torch.dtype], Any]:
    """q, the keys and values of each sequence, and the arguments that both attention operators share."""

    def make(dtype: torch.dtype) -> Any:
        q = normal(dtype, sum(QUERIES), 8, 32)
        keys, values = ([normal(dtype, length, 2, 32) for length in LENGTHS] for _ in range(2))
        pages = paginate(*LENGTHS)
        caches = [pages.fill(x).transpose(1, 2).contiguous() for x in (keys, values)]
        return q, keys, values, caches, (pages.block_table, *packed(QUERIES, LENGTHS))

    return make


@dtypes
def test_dense_attention(dtype: torch.dtype, batch: Callable[[torch.dtype], Any]) -> None:
    q, keys, values, caches, where = batch(dtype)
    out, lse = m3_hw.dense_attention(q, *caches, *where, scale=32**-0.5, max_seqlen_q=40, max_seqlen_k=400)
    for b, (rows, start) in enumerate(zip(QUERIES, (0, QUERIES[0]), strict=True)):
        tokens = slice(start, start + rows)
        expected_out, expected_lse = attention(q[tokens], keys[b], values[b], visible(QUERIES, LENGTHS, b))
        assert_near(out[tokens], expected_out)
        assert_near(lse[tokens], expected_lse)


@dtypes
def test_sparse_attention(dtype: torch.dtype, batch: Callable[[torch.dtype], Any], random: torch.Generator) -> None:
    q, keys, values, caches, where = batch(dtype)
    ids = torch.randint(-1, 5, (2, sum(QUERIES), 4), generator=random).int()  # repeats, -1 and blocks of the future among them
    ids[..., 0] = 0
    out, lse = m3_hw.sparse_attention(q, *caches, ids, *where, scale=32**-0.5, max_seqlen_q=40)
    for b, (rows, start) in enumerate(zip(QUERIES, (0, QUERIES[0]), strict=True)):
        tokens = slice(start, start + rows)
        block = torch.arange(LENGTHS[b]) // 128
        listed = (ids[:, tokens, :, None] == block).any(2).repeat_interleave(4, 0)  # [Hq, T, keys]
        expected_out, expected_lse = attention(q[tokens], keys[b], values[b], listed & visible(QUERIES, LENGTHS, b))
        assert_near(out[tokens], expected_out)
        assert_near(lse[tokens], expected_lse)


@dtypes
def test_varlen_attention(dtype: torch.dtype, normal: Normal) -> None:
    q, k, v = (normal(dtype, 47, 2, 80) for _ in range(3))
    bounds = (0, 24, 24, 31, 47)
    out = m3_hw.varlen_attention(q, k, v, torch.tensor(bounds, dtype=torch.int32), scale=80**-0.5, max_seqlen=24)
    for start, stop in pairwise(bounds):
        if stop > start:
            clip = slice(start, stop)
            expected, _ = attention(q[clip], k[clip], v[clip], torch.ones(stop - start, stop - start, dtype=torch.bool))
            assert_near(out[clip], expected)


def test_select_blocks(normal: Normal, paginate: Callable[..., Any], packed: Callable[..., Any]) -> None:
    length, top_k = 1300, 4
    q, keys = normal(torch.float64, length, 3, 16), normal(torch.float64, length, 16)
    pages = paginate(length)
    ids = m3_hw.select_blocks(
        q,
        pages.fill([keys]),
        pages.block_table,
        *packed([length], [length]),
        top_k=top_k,
        local_blocks=1,
        init_blocks=1,
        max_seqlen_q=length,
        max_seqlen_k=length,
    )
    scores = torch.einsum("thd,kd->htk", q, keys).masked_fill(torch.ones(length, length, dtype=torch.bool).triu(1), -torch.inf)
    scores = F.pad(scores, (0, -length % 128), value=-torch.inf).unflatten(-1, (-1, 128)).amax(-1)  # [Hi, T, blocks]
    own = torch.arange(length) // 128
    scores[:, torch.arange(length), own] = torch.inf
    scores[..., 0] = torch.inf
    best = scores.topk(top_k, dim=-1)
    unused = torch.iinfo(torch.int64).max
    expected = best.indices.masked_fill(best.values == -torch.inf, unused).sort(-1).values
    assert torch.equal(ids.long(), expected.masked_fill(expected == unused, -1))


@dtypes
def test_route_tokens(dtype: torch.dtype, normal: Normal) -> None:
    logits, bias = normal(dtype, 60, 128), normal(wide(dtype), 128)
    weights, ids = m3_hw.route_tokens(logits, bias, top_k=4, scale=2.0)
    scores = logits.double().sigmoid()
    expected = (scores + bias.double()).topk(4, dim=-1).indices
    assert torch.equal(ids.long(), expected)
    assert_near(weights, 2 * F.normalize(scores.gather(-1, expected), p=1, dim=-1))


@dtypes
def test_grouped_gemm(dtype: torch.dtype, normal: Normal) -> None:
    sizes = (0, 8, 1, 0, 16, 32, 63, 0, 64, 65, 0)
    rows, weight = normal(dtype, sum(sizes) + 3, 48), normal(dtype, len(sizes), 40, 48)
    y = m3_hw.grouped_gemm(rows, weight, torch.tensor([0, *sizes]).cumsum(0).int())
    parts = rows.double().split([*sizes, 3])
    expected = [F.linear(part, w) for part, w in zip(parts, weight.double(), strict=False)]
    assert_near(y, torch.cat((*expected, torch.zeros(3, 40, dtype=torch.float64))))


@dtypes
def test_permute_and_unpermute(dtype: torch.dtype, normal: Normal, random: torch.Generator) -> None:
    x, weights = normal(dtype, 30, 24), normal(wide(dtype), 30, 4)
    ids = torch.randint(-2, 8, (30, 4), generator=random, dtype=torch.int32)
    rows, source, offsets = m3_hw.permute_tokens(x, ids, 6)
    tokens, experts = torch.arange(30).repeat_interleave(4), ids.flatten()
    for e in range(6):
        assert torch.equal(rows[offsets[e] : offsets[e + 1]], x[tokens[experts == e]])
    kept = (ids >= 0) & (ids < 6)
    one_hot = F.one_hot(tokens, 30).double() * (weights.double() * kept).flatten()[:, None]  # [T*A, T]
    assert_near(m3_hw.unpermute_tokens(rows, source, weights), one_hot.T @ x.double()[tokens])


@dtypes
def test_moe_experts(dtype: torch.dtype, normal: Normal, random: torch.Generator) -> None:
    x, weights = normal(dtype, 25, 64), normal(wide(dtype), 25, 3).abs()
    ids = torch.rand(25, 6, generator=random).argsort(-1)[:, :3].int()
    w_gate_up, w_down = normal(dtype, 6, 96, 64) / 8, normal(dtype, 6, 64, 48) / 8
    gate, up = torch.einsum("th,eih->tei", x.double(), w_gate_up.double()).chunk(2, dim=-1)
    hidden = (up.clamp(-7, 7) + 1) * F.silu(1.702 * gate.clamp(max=7)) / 1.702
    outputs = torch.einsum("tei,ehi->teh", hidden, w_down.double())  # every expert on every token
    counted = torch.zeros(25, 6, dtype=torch.float64).scatter_(1, ids.long(), weights.double())
    y = m3_hw.moe_experts(x, weights, ids, w_gate_up, w_down, alpha=1.702, limit=7.0)
    assert_near(y, torch.einsum("te,teh->th", counted, outputs))


def groups(shape: tuple[int, int], granularity: str) -> list[list[tuple[slice, slice]]]:
    """Rows and columns that share each scale, in the order of the scale's elements."""
    height, width = {"tensor": shape, "row": (1, shape[1]), "group128": (1, 128), "block128": (128, 128)}[granularity]
    return [[(slice(i, i + height), slice(j, j + width)) for j in range(0, shape[1], width)] for i in range(0, shape[0], height)]


@pytest.mark.parametrize("granularity", ["tensor", "row", "group128", "block128"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_quantize_fp8(granularity: str, dtype: torch.dtype, normal: Normal) -> None:
    """Bit for bit: the casts are numpy's, through ml_dtypes."""
    x = normal(dtype, 150, 200) * 3
    x[7] = 0
    y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
    values = x.float().numpy()
    for i, row in enumerate(groups((150, 200), granularity)):
        for j, group in enumerate(row):
            expected_scale = np.abs(values[group]).max() / np.float32(448) or np.float32(1)
            assert scale[i, j].item() == expected_scale
            expected = (values[group] / expected_scale).astype(ml_dtypes.float8_e4m3fn)
            assert np.array_equal(y[group].view(torch.uint8).numpy(), expected.view(np.uint8))
    assert scale.shape == (len(groups((150, 200), granularity)), len(groups((150, 200), granularity)[0]))


@pytest.mark.parametrize(("of_a", "of_b"), [("row", "row"), ("group128", "block128"), ("tensor", "tensor")])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_gemm_fp8(of_a: str, of_b: str, out_dtype: torch.dtype, normal: Normal) -> None:
    def draw(num_rows: int, granularity: str) -> tuple[Tensor, Tensor, Tensor]:
        """Values, scales, and what both stand for, [rows, 300]."""
        values = normal(torch.float32, num_rows, 300).to(FP8)
        where = groups((num_rows, 300), granularity)
        scale = normal(torch.float32, len(where), len(where[0])).abs() + 0.1
        meant = values.double()
        for i, row in enumerate(where):
            for j, group in enumerate(row):
                meant[group] *= scale[i, j].double()
        return values, scale, meant

    a, a_scale, meant_a = draw(20, of_a)
    b, b_scale, meant_b = draw(140, of_b)
    assert_near(m3_hw.gemm_fp8(a, b, a_scale, b_scale, out_dtype=out_dtype), F.linear(meant_a, meant_b))


def test_dequantize_mxfp8_of_every_byte_with_every_scale() -> None:
    w = torch.arange(256, dtype=torch.uint8).expand(256, 256).contiguous()
    scale = torch.arange(256, dtype=torch.uint8)[:, None].expand(256, 8).contiguous()
    y = m3_hw.dequantize_mxfp8(w.view(FP8), scale)
    powers = torch.ldexp(torch.ones(256, dtype=torch.float64), torch.arange(256) - 127)
    powers[255] = torch.nan
    expected = torch.from_numpy(w.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)) * powers[:, None]
    assert torch.equal(y.isnan(), expected.isnan())
    narrow = expected.to(torch.bfloat16)
    assert torch.equal(y.nan_to_num(0.0).view(torch.int16), narrow.nan_to_num(0.0).view(torch.int16))


@pytest.mark.parametrize("fp8", [False, True])
def test_write_kv(fp8: bool, normal: Normal) -> None:
    cache_dtype = FP8 if fp8 else torch.bfloat16
    k, v, index_k = (normal(torch.bfloat16, *shape) * 100 for shape in ((5, 2, 16), (5, 2, 16), (5, 8)))
    slots = torch.tensor([130, -1, 0, 383, 127], dtype=torch.int32)
    caches = [torch.zeros(shape).to(cache_dtype) for shape in ((3, 2, 128, 16), (3, 2, 128, 16), (3, 128, 8))]
    scales = {"k_scale": 0.5, "v_scale": 2.0, "index_k_scale": 0.25} if fp8 else {}
    m3_hw.write_kv(k, v, index_k, *caches, slots, **scales)

    written = torch.tensor([0, 2, 3, 4])
    for tokens, cache, name in zip((k, v, index_k), caches, ("k_scale", "v_scale", "index_k_scale"), strict=True):
        flat = cache.float().transpose(1, 2).flatten(0, 1) if cache.dim() == 4 else cache.float().flatten(0, 1)  # [N*P, ...]
        expected = torch.zeros(flat.shape)
        stored = (tokens.float() / scales.get(name, 1.0))[written].numpy()
        if fp8:
            stored = stored.clip(-448, 448).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
        expected[slots[written].long()] = torch.from_numpy(stored)
        assert torch.equal(flat, expected)

"""Write of new keys and values into the paged caches."""

from typing import Any

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, FP8, PAGE_SIZE, expect_cache, expect_dtype, expect_positive, expect_rank, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.ops.quantize_fp8 import to_fp8
from m3_hw.paged import with_far_pages
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, exact_tolerances, spoil


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
    """Write each token's key, value and index key into its slot of the caches.

    cache[slot // 128, h, slot % 128] = k[t, h] where slot = slots[t]; fp8 caches: round(clamp(k[t, h] / scale, -448, 448))

    Args:
        k, v: [T, Hkv, D], floating, of one dtype.
        index_k: [T, Di] in k's dtype, or None with index_k_cache None (layers without MSA).
        k_cache, v_cache: [N, Hkv, 128, D] in k's dtype or fp8 e4m3fn. Written.
        index_k_cache: [N, 128, Di], likewise. Written.
        slots: [T] int32 or int64, page * 128 + offset; -1 skips the row, which may hold anything. No slot twice.
        k_scale, v_scale, index_k_scale: What fp8 values are divided by; 1 for a cache that is not fp8.

    Returns:
        None. What no slot names keeps its bits.

    Raises:
        ContractError: A shape or dtype differs, fp8 formats other than e4m3fn included; only one of index_k and index_k_cache
            is None; a scale is not finite and above 0, or not 1 for a cache that is not fp8; in value checks: a slot outside
            -1 to N*128-1, or twice. Nothing has been written then.

    Numerics: fp8 values are divided in fp32 (correctly rounded: no product with a reciprocal), clamped and rounded once, to
        nearest even. inf is clamped too; NaN stays NaN.

    Source: the paged cache of vLLM's `reshape_and_cache`, head-major; fp8 clamps as in vllm-ascend's MiniMax-M3.
    """
    kept = slots >= 0
    page, offset = slots[kept].long() // PAGE_SIZE, slots[kept].long() % PAGE_SIZE
    k_cache[page, :, offset] = _stored(k[kept], k_cache.dtype, k_scale)  # [kept, Hkv, D]
    v_cache[page, :, offset] = _stored(v[kept], v_cache.dtype, v_scale)
    if index_k is not None and index_k_cache is not None:
        index_k_cache[page, offset] = _stored(index_k[kept], index_k_cache.dtype, index_k_scale)  # [kept, Di]


def _stored(values: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    if dtype != FP8:
        return values
    wide = values.to(torch.float32)
    return to_fp8(wide, wide.new_full((), scale))


def _fake(
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
    return None


def _check(
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
    expect_rank("k", k, "T Hkv D")
    expect_dtype("k", k, FLOATS)
    num_tokens, num_heads, dim = k.shape
    expect_shape("v", v, "T Hkv D", k.shape)
    expect_dtype("v", v, (k.dtype,))
    expect_cache("k_cache", k_cache, "N Hkv P D", (-1, num_heads, PAGE_SIZE, dim), k.dtype)
    expect_cache("v_cache", v_cache, "N Hkv P D", k_cache.shape, k.dtype)
    if index_k is not None and index_k_cache is not None:
        expect_shape("index_k", index_k, "T Di", (num_tokens, -1))
        expect_dtype("index_k", index_k, (k.dtype,))
        expect_cache("index_k_cache", index_k_cache, "N P Di", (k_cache.shape[0], PAGE_SIZE, index_k.shape[1]), k.dtype)
    elif index_k is not None:
        fail("index_k_cache", "None beside an index_k", "a cache [N, P, Di], or None for both")
    elif index_k_cache is not None:
        fail("index_k", "None beside an index_k_cache", "[T, Di], or None for both")
    expect_shape("slots", slots, "T", (num_tokens,))
    expect_dtype("slots", slots, (torch.int64, torch.int32))
    _expect_scale("k_scale", k_scale, k_cache)
    _expect_scale("v_scale", v_scale, v_cache)
    _expect_scale("index_k_scale", index_k_scale, index_k_cache)


def _expect_scale(argument: str, scale: float, cache: Tensor | None) -> None:
    """A scale that would be ignored is refused."""
    expect_positive(argument, scale)
    if scale != 1 and (cache is None or cache.dtype != FP8):
        fail(argument, f"value {scale} for a cache that is not fp8", "1")


def _check_values(
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
    capacity = k_cache.shape[0] * PAGE_SIZE
    outside = (slots < -1) | (slots >= capacity)
    if bool(outside.any()):
        t = int(outside.nonzero()[0])
        fail("slots", f"value {int(slots[t])} at index {t}", f"-1 to {capacity - 1}, the slots of the pool's {k_cache.shape[0]} pages")
    taken = slots[slots >= 0].sort().values
    repeated = taken[1:][taken[1:] == taken[:-1]]
    if len(repeated):
        fail("slots", f"value {int(repeated[0])} more than once", "each slot once at most")


def _unowned(call: Call) -> dict[str, Tensor]:
    skipped = call["slots"] < 0  # [T]
    rows = {"k": skipped[:, None, None], "v": skipped[:, None, None], "index_k": skipped[:, None]}
    return {name: mask.expand_as(call[name]) for name, mask in rows.items() if call[name] is not None}


def _call(
    draw: Draw,
    dtype: torch.dtype,
    num_tokens: int,
    *,
    num_pages: int = 3,
    heads: int = 2,
    dim: int = 16,
    index_dim: int = 8,
    skipped: int = 0,
    fp8: tuple[str, ...] = (),
    scale: float = 1.0,
    slots_dtype: torch.dtype = torch.int64,
) -> Call:
    """One of `skipped` rows has slot -1 (0: none); `fp8` names the caches stored so, by `scale`; index_dim 0: no index.

    Values reach beyond 448, so that fp8 clamps a share of them.
    """
    slots = draw.permutation(num_pages * PAGE_SIZE)[:num_tokens].to(slots_dtype)
    if skipped:
        slots[draw.integers(0, skipped, (num_tokens,)) == 0] = -1

    def cache(name: str, *shape: int) -> Tensor:
        return draw.values(shape, dtype).to(FP8 if name in fp8 else dtype)

    caches = {
        "k_cache": cache("k_cache", num_pages, heads, PAGE_SIZE, dim),
        "v_cache": cache("v_cache", num_pages, heads, PAGE_SIZE, dim),
        "index_k_cache": cache("index_k_cache", num_pages, PAGE_SIZE, index_dim) if index_dim else None,
    }
    return {
        "k": draw.values((num_tokens, heads, dim), dtype, scale=512),
        "v": draw.values((num_tokens, heads, dim), dtype, scale=512),
        "index_k": draw.values((num_tokens, index_dim), dtype, scale=512) if index_dim else None,
        **caches,
        "slots": slots,
        **{
            name.replace("cache", "scale"): 1.0 if c is None or c.dtype != FP8 else scale * factor
            for (name, c), factor in zip(caches.items(), (1, 2, 0.5), strict=True)
        },
    }


_CACHES = ("k_cache", "v_cache", "index_k_cache")


def _sample(num_tokens: int, **options: Any) -> Any:
    return lambda draw, dtype: _call(draw, dtype, num_tokens, **options)


def _not_finite(draw: Draw, dtype: torch.dtype) -> Call:
    """What is stored as fp8 holds NaN, which stays, and infinities, which are clamped."""
    call = _call(draw, dtype, 11, fp8=_CACHES)
    for name in ("k", "v", "index_k"):
        call[name].flatten()[:3] = torch.tensor([torch.nan, torch.inf, -torch.inf])
    return call


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    num_pages = draw.integer(1, 5)
    return _call(
        draw,
        dtype,
        draw.integer(0, min(num_pages * PAGE_SIZE, 200)),
        num_pages=num_pages,
        heads=draw.integer(1, 6),
        dim=draw.integer(1, 70),
        index_dim=draw.integer(0, 70),
        skipped=draw.choice((0, 1, 2, 8)),
        fp8=tuple(name for name in _CACHES if draw.integer(0, 2)),
        scale=draw.choice((1.0, 0.5, 0.3, 7.0)),
        slots_dtype=draw.choice((torch.int64, torch.int32)),
    )


_exact = exact_tolerances("a copy, or one fp32 division and one rounding to fp8")

SPEC = OpSpec(
    reference=write_kv,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=_CACHES,
    mutates=_CACHES,
    tolerances=dict.fromkeys(_CACHES, _exact),
    # Not in fp64, which would turn fp8 caches into fp64 ones: fp32 division and the rounding to fp8 are the contract.
    golden=write_kv,
    pools={"slots": _CACHES},
    unowned=_unowned,
    samples=(
        Sample(name="tokens", make=_sample(7, skipped=4)),
        Sample(name="none_skipped", make=_sample(9)),
        Sample(name="all_skipped", make=_sample(5, skipped=1)),
        Sample(name="empty", make=_sample(0)),
        Sample(name="one_token", make=_sample(1, heads=1, dim=17, index_dim=9)),
        Sample(name="odd", make=_sample(13, heads=3, dim=33, index_dim=7, skipped=3)),
        Sample(name="fp8_not_finite", make=_not_finite),
        Sample(name="fp8_index", make=_sample(11, fp8=("index_k_cache",), scale=0.3)),
        Sample(name="fp8_keys", make=_sample(11, fp8=("k_cache",), scale=0.3)),
        Sample(name="full_pool", make=_sample(2 * PAGE_SIZE, num_pages=2)),
        Sample(name="no_index", make=_sample(6, index_dim=0, skipped=3)),
        Sample(name="int32_slots", make=_sample(6, slots_dtype=torch.int32, skipped=3)),
        Sample(name="fp8", make=_sample(11, fp8=_CACHES, skipped=4)),
        Sample(name="fp8_scaled", make=_sample(11, fp8=_CACHES, scale=0.3, skipped=4)),
        Sample(name="fp8_values_only", make=_sample(6, fp8=("v_cache",), scale=2.0)),
        Sample(name="fp8_no_index", make=_sample(6, fp8=("k_cache", "v_cache"), index_dim=0, scale=3.0)),
        Sample(name="m3_prefill", tier="model", make=_sample(1024, num_pages=16, heads=4, dim=128, index_dim=128, skipped=64)),
        Sample(name="m3_prefill_fp8", tier="model", make=_sample(1024, num_pages=16, heads=4, dim=128, index_dim=128, fp8=_CACHES)),
        Sample(name="m3_decode", tier="model", make=_sample(8, num_pages=16, heads=4, dim=128, index_dim=128)),
        Sample(name="m3_dense_layer", tier="model", make=_sample(256, num_pages=16, heads=4, dim=128, index_dim=0)),
        Sample(name="long", tier="stress", make=_sample(16385, num_pages=192, heads=4, dim=128, index_dim=128, skipped=32)),
        Sample(name="far_pages", tier="stress", make=lambda draw, dtype: with_far_pages(_call(draw, dtype, 300, num_pages=4))),
        Sample(name="long_fp8", tier="stress", make=_sample(16385, num_pages=192, heads=4, dim=128, index_dim=128, fp8=_CACHES, scale=0.7)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="k of rank 2", argument="k", change=spoil(k=lambda k: k[:, 0])),
        ErrorSample(name="integer k", argument="k", change=spoil(k=lambda k: k.int())),
        ErrorSample(name="v of other tokens", argument="v", change=spoil(v=lambda v: v[1:])),
        ErrorSample(name="v in float64", argument="v", change=spoil(v=lambda v: v.double())),
        ErrorSample(name="index_k of other tokens", argument="index_k", change=spoil(index_k=lambda k: k[1:])),
        ErrorSample(name="index_k in float64", argument="index_k", change=spoil(index_k=lambda k: k.double())),
        ErrorSample(name="index_k missing", argument="index_k", change=spoil(index_k=None)),
        ErrorSample(name="index_k_cache missing", argument="index_k_cache", change=spoil(index_k_cache=None)),
        ErrorSample(name="index cache of another width", argument="index_k_cache", change=spoil(index_k_cache=lambda c: c[..., 1:])),
        ErrorSample(name="index cache of fewer pages", argument="index_k_cache", change=spoil(index_k_cache=lambda c: c[1:])),
        ErrorSample(name="page of 64", argument="k_cache", change=spoil(k_cache=lambda c: c[:, :, :64])),
        ErrorSample(name="page-major cache", argument="k_cache", change=spoil(k_cache=lambda c: c.transpose(1, 2))),
        ErrorSample(name="cache of fewer heads", argument="k_cache", change=spoil(k_cache=lambda c: c[:, 1:])),
        ErrorSample(name="fnuz cache", argument="k_cache", change=spoil(k_cache=lambda c: c.to(torch.float8_e4m3fnuz))),
        ErrorSample(name="e5m2 cache", argument="v_cache", change=spoil(v_cache=lambda c: c.to(torch.float8_e5m2))),
        ErrorSample(name="k and v differ in pages", argument="v_cache", change=spoil(v_cache=lambda c: c[1:])),
        ErrorSample(name="fnuz index cache", argument="index_k_cache", change=spoil(index_k_cache=lambda c: c.to(torch.float8_e4m3fnuz))),
        ErrorSample(name="slots too short", argument="slots", change=spoil(slots=lambda s: s[1:])),
        ErrorSample(name="slots of rank 2", argument="slots", change=spoil(slots=lambda s: s[None])),
        ErrorSample(name="slots in float", argument="slots", change=spoil(slots=lambda s: s.float())),
        ErrorSample(name="k_scale NaN", argument="k_scale", change=spoil(k_scale=float("nan"))),
        ErrorSample(name="k_scale that fp32 loses", argument="k_scale", change=spoil(k_scale=1e-50)),
        ErrorSample(name="v_scale beyond fp32", argument="v_scale", change=spoil(v_scale=1e39)),
        ErrorSample(name="v_scale zero", argument="v_scale", change=spoil(v_scale=0.0)),
        ErrorSample(name="index_k_scale infinite", argument="index_k_scale", change=spoil(index_k_scale=float("inf"))),
        ErrorSample(name="k_scale without fp8", argument="k_scale", change=spoil(k_scale=0.5)),
        ErrorSample(name="slot past the pool", argument="slots", reads_values=True, change=spoil(slots=lambda s: s + 3 * PAGE_SIZE)),
        ErrorSample(name="slot below -1", argument="slots", reads_values=True, change=spoil(slots=lambda s: s - 9999)),
        ErrorSample(name="slot twice", argument="slots", reads_values=True, change=spoil(slots=lambda s: s * 0 + 5)),
    ),
)

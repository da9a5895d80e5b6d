"""The lines of the benchmark: operators at M3's widths, attention over its production shapes, and what has a target."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import torch
from torch import Tensor

import m3_hw
from m3_hw.bench.baselines import Baseline, baseline
from m3_hw.bench.costs import Cost, cost
from m3_hw.bench.timing import Run
from m3_hw.contract import FP8, PAGE_SIZE
from m3_hw.draw import Draw
from m3_hw.paged import paged_batch
from m3_hw.spec import Call
from m3_hw.workloads import Workload, decode, prefill, scaled_for_cpu

BOTH = (torch.bfloat16, torch.float32)
BF16 = BOTH[:1]


class Job(NamedTuple):
    """One line, its inputs made: what to time, what it costs at least, what it is compared with.

    call: Of the operator whose baseline it is compared with.
    """

    run: Run
    cost: Cost
    op: str
    call: Call

    def baseline(self) -> Baseline:
        """The torch formulation, prepared."""
        return baseline(self.op, self.call)


@dataclass(frozen=True)
class Target:
    """What a line should reach: `metric` of the line at least (or at most) `limit`."""

    metric: str
    limit: float
    at_least: bool = True


@dataclass(frozen=True)
class Benchmark:
    """A line to measure. `ops` are the operators that it calls; `make` builds its inputs for a dtype on a device."""

    name: str
    ops: tuple[str, ...]
    workload: str
    make: Callable[["Inputs"], Job]
    dtypes: tuple[torch.dtype, ...] = BF16
    note: str = ""
    targets: tuple[Target, ...] = ()
    graph: bool = False  # replay from a CUDA graph: too short to launch one by one


@dataclass(frozen=True)
class Scale:
    """Sizes that differ between a CPU, an accelerator and a quick check."""

    tokens: int  # of the elementwise operators
    expert_tokens: tuple[int, ...]  # of the expert operators, a line each
    experts: int
    hidden: int
    width: int
    heads: int
    kv_heads: int
    dim: int
    gemm: tuple[int, int, int]  # M, Nd, Kd of gemm_fp8
    images: tuple[int, ...]  # patches of each image
    path: tuple[tuple[int, int], ...]  # queries over keys of select + attend
    path_targets: tuple[Target, ...]
    shapes: tuple[Workload, ...]
    dense_shapes: tuple[Workload, ...]  # those that dense attention is measured on too


def _heaviest(count: int) -> tuple[Workload, ...]:
    """The prefill shapes that stand for most production calls."""
    return tuple(sorted(prefill(), key=lambda w: -w.weight)[:count])


def _named(*names: str) -> tuple[Workload, ...]:
    return tuple(w for w in decode() if w.name in names)


def _cpu_scale() -> Scale:
    shapes = tuple(scaled_for_cpu(w) for w in (*prefill(), *_named("decode_b8_k50000", "decode_low_latency_b1_k32000")))
    dense = tuple(scaled_for_cpu(w) for w in (*_heaviest(2), *_named("decode_low_latency_b1_k32000")))
    targets = (Target("ratio", 4.0), Target("peak_memory", 4 * 2**30, at_least=False))
    return Scale(4096, (256,), 4, 6144, 3072, 64, 4, 128, (512, 3072, 6144), (1024, 576), ((8192, 32768),), targets, shapes, dense)


def _gpu_scale() -> Scale:
    shapes = (*prefill(), *decode())
    dense = (*_heaviest(4), *_named("decode_b8_k200000", "decode_low_latency_b1_k32000"))
    path = ((8192, 2**15), (8192, 2**17), (8192, 2**20))
    tokens = (16, 128, 1024, 8192, 32768)
    images = (4096, 4096, 1024)
    return Scale(8192, tokens, 128, 6144, 3072, 64, 4, 128, (8192, 8192, 8192), images, path, (), shapes, dense)


def _quick_scale() -> Scale:
    shapes = tuple(scaled_for_cpu(w, max_queries=4, max_keys=512) for w in (prefill()[0], decode()[0]))
    targets = _cpu_scale().path_targets
    return Scale(128, (8,), 4, 256, 128, 8, 2, 16, (128, 128, 256), (16, 9), ((32, 512),), targets, shapes, shapes)


def benchmarks(device: torch.device, *, quick: bool) -> list[Benchmark]:
    """Every line for a device, the ones with a target first."""
    scale = _quick_scale() if quick else _cpu_scale() if device.type == "cpu" else _gpu_scale()
    small = device.type != "cpu"
    return [
        *(_path(scale, queries, keys, BF16 if small else BOTH, scale.path_targets) for queries, keys in scale.path),
        _long(quick),
        *chain.from_iterable(_attention(scale, w) for w in scale.shapes),
        *(_dense(scale, w) for w in scale.dense_shapes),
        *_elementwise(scale),
        *_experts(scale),
        *_fp8(scale),
    ]


@dataclass(frozen=True)
class Inputs:
    """Makes tensors of a dtype on a device; the same ones each time, though not on every device."""

    dtype: torch.dtype
    device: torch.device
    generator: torch.Generator = field(compare=False)

    @classmethod
    def on(cls, dtype: torch.dtype, device: torch.device, seed: int = 0) -> "Inputs":
        """Freshly seeded."""
        return cls(dtype, device, torch.Generator(device).manual_seed(seed))

    def values(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """Uniform values in -scale .. scale."""
        out = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return out.uniform_(-scale, scale, generator=self.generator)

    def integers(self, low: int, high: int, *shape: int) -> Tensor:
        """int32 values of low to high - 1."""
        return torch.randint(low, high, shape, dtype=torch.int32, device=self.device, generator=self.generator)

    def top(self, k: int, *shape: int) -> Tensor:
        """int32 ids of k distinct ones out of the last axis's number, in every row."""
        return torch.rand(shape, device=self.device, generator=self.generator).topk(k, dim=-1).indices.int()


def _job(op: str, call: Call) -> Job:
    operator = getattr(m3_hw, op)
    return Job(lambda: operator(**call), cost(op, call), op, call)


def _single(op: str, workload: str, make: Callable[[Inputs], Call], **facts: Any) -> Benchmark:
    """A line that calls one operator once."""
    return Benchmark(f"{op}, {workload}", (op,), workload, lambda inputs: _job(op, make(inputs)), **facts)


class _Paged(NamedTuple):
    """A packed batch and its caches."""

    batch: dict[str, Tensor]
    k_cache: Tensor  # [N, Hkv, P, D]
    v_cache: Tensor
    index_k_cache: Tensor  # [N, P, D]


@functools.lru_cache(maxsize=1)
def _paged(inputs: Inputs, queries: tuple[int, ...], lengths: tuple[int, ...], kv_heads: int, dim: int) -> _Paged:
    """Kept for the next line, which often asks for the same: the caches are what takes long to make."""
    batch, _, num_pages = paged_batch(Draw(0), queries, lengths)
    keys, values = (inputs.values(num_pages, kv_heads, PAGE_SIZE, dim) for _ in range(2))
    batch = {name: tensor.to(inputs.device) for name, tensor in batch.items()}
    return _Paged(batch, keys, values, inputs.values(num_pages, PAGE_SIZE, dim))


def forget_inputs() -> None:
    """Free what the last attention line left."""
    _paged.cache_clear()


class _Shape(NamedTuple):
    """A packed batch at M3's heads."""

    queries: tuple[int, ...]
    lengths: tuple[int, ...]
    heads: int
    kv_heads: int
    dim: int

    def paged(self, inputs: Inputs) -> _Paged:
        return _paged(Inputs.on(inputs.dtype, inputs.device, seed=1), self.queries, self.lengths, self.kv_heads, self.dim)

    def select_call(self, inputs: Inputs) -> Call:
        """M3's selection: top 16, the query's own block forced."""
        paged = self.paged(inputs)
        index_q = inputs.values(sum(self.queries), self.kv_heads, self.dim)
        sizes = {"max_seqlen_q": max(self.queries), "max_seqlen_k": max(self.lengths)}
        return {"index_q": index_q, "index_k_cache": paged.index_k_cache, **paged.batch, **_TOP_BLOCKS, **sizes}

    def attend_call(self, inputs: Inputs, block_ids: Tensor | None = None) -> Call:
        """Sparse attention over the ids, or dense attention without them."""
        paged = self.paged(inputs)
        q = inputs.values(sum(self.queries), self.heads, self.dim, scale=4)
        call: Call = {"q": q, "k_cache": paged.k_cache, "v_cache": paged.v_cache}
        call |= {} if block_ids is None else {"block_ids": block_ids}
        call |= {**paged.batch, "scale": self.dim**-0.5, "max_seqlen_q": max(self.queries)}
        return call if block_ids is not None else {**call, "max_seqlen_k": max(self.lengths)}

    def random_ids(self, inputs: Inputs) -> Tensor:
        """[Hkv, T, K]: the query's own block and as many drawn ones before it as there are."""
        parts = [torch.arange(length - count, length) for count, length in zip(self.queries, self.lengths, strict=True)]
        own = torch.cat(parts).to(inputs.device) // PAGE_SIZE  # [T]
        num_blocks = int(own.max()) + 1
        drawn = torch.rand(self.kv_heads, own.shape[0], num_blocks, device=inputs.device, generator=inputs.generator)
        drawn.masked_fill_(torch.arange(num_blocks, device=inputs.device) >= own[:, None], -1)
        best = drawn.topk(min(_TOP_BLOCKS["top_k"] - 1, num_blocks), dim=-1)
        ids = best.indices.masked_fill(best.values < 0, num_blocks)
        ids = torch.cat([ids, own[None, :, None].expand(self.kv_heads, -1, 1)], dim=-1).sort(-1).values
        return ids.masked_fill(ids == num_blocks, -1).int().contiguous()


_TOP_BLOCKS = {"top_k": 16, "local_blocks": 1, "init_blocks": 0}


def _shape(scale: Scale, workload: Workload) -> _Shape:
    """Lengths vary around the nominal one; none but the longest is a multiple of a page."""
    lengths = tuple(workload.kv_len - 7 * b for b in range(workload.batch))
    return _Shape((workload.num_queries,) * workload.batch, lengths, scale.heads, scale.kv_heads, scale.dim)


def _attention(scale: Scale, workload: Workload) -> list[Benchmark]:
    """Selection, and attention over random blocks, on one production shape."""
    shape = _shape(scale, workload)
    facts = {"note": getattr(workload, "note", ""), "graph": workload.name.startswith("decode")}
    return [
        _single("select_blocks", workload.name, shape.select_call, **facts),
        _single("sparse_attention", workload.name, lambda x: shape.attend_call(x, shape.random_ids(x)), **facts),
    ]


def _dense(scale: Scale, workload: Workload) -> Benchmark:
    facts = {"note": getattr(workload, "note", ""), "graph": workload.name.startswith("decode")}
    return _single("dense_attention", workload.name, _shape(scale, workload).attend_call, **facts)


def _path(scale: Scale, queries: int, keys: int, dtypes: tuple[torch.dtype, ...], targets: tuple[Target, ...]) -> Benchmark:
    """A layer's attention path, against dense attention over every key."""
    shape = _Shape((queries,), (keys,), scale.heads, scale.kv_heads, scale.dim)
    workload = f"{queries} queries over {keys} keys"
    facts: dict[str, Any] = {"targets": targets, "note": "baseline: dense attention"}
    return Benchmark(f"select + attend, {workload}", _PATH_OPS, workload, lambda x: _select_and_attend(shape, x), dtypes, **facts)


_PATH_OPS = ("select_blocks", "sparse_attention")


def _select_and_attend(shape: _Shape, inputs: Inputs) -> Job:
    """Attention sees the blocks that the selection gives."""
    select = shape.select_call(inputs)
    random = shape.attend_call(inputs, shape.random_ids(inputs))  # what the selection's ids cost is what random ids cost

    def run() -> Any:
        return m3_hw.sparse_attention(**{**random, "block_ids": m3_hw.select_blocks(**select)})

    first, second = cost("select_blocks", select), cost("sparse_attention", random)
    total = Cost(first.bytes + second.bytes, first.operations + second.operations)
    return Job(run, total, "sparse_attention", random)


def _long(quick: bool) -> Benchmark:
    """The longest context, as the last queries of a chunk see it."""
    keys = 2**20 if not quick else 2**11
    shape = _Shape((64,), (keys,), 64, 4, 128) if not quick else _Shape((4,), (keys,), 8, 2, 16)
    workload = f"{'1M' if not quick else keys} keys with {shape.queries[0]} queries"
    make = functools.partial(_select_and_attend, shape)
    return Benchmark(f"select + attend, {workload}", _PATH_OPS, workload, make, note="baseline: dense attention")


def _elementwise(scale: Scale) -> list[Benchmark]:
    tokens, hidden, heads, dim = scale.tokens, scale.hidden, scale.heads, scale.dim
    rows, per_head = f"{tokens} x {hidden}", f"{tokens} x {heads} x {dim}"

    def tables(x: Inputs) -> Call:
        angle = x.values(tokens, dim // 4, scale=3, dtype=torch.float32)
        return {"cos": angle.cos(), "sin": angle.sin()}

    def cached(x: Inputs) -> Call:
        kv_heads, pages = scale.kv_heads, tokens // PAGE_SIZE + 2
        slots = torch.randperm(pages * PAGE_SIZE, generator=torch.Generator().manual_seed(0))[:tokens]
        return {
            "k": x.values(tokens, kv_heads, dim),
            "v": x.values(tokens, kv_heads, dim),
            "index_k": x.values(tokens, dim),
            "k_cache": x.values(pages, kv_heads, PAGE_SIZE, dim),
            "v_cache": x.values(pages, kv_heads, PAGE_SIZE, dim),
            "index_k_cache": x.values(pages, PAGE_SIZE, dim),
            "slots": slots.int().to(x.device),
        }

    def norm(x: Inputs) -> Call:
        return {"x": x.values(tokens, hidden), "weight": x.values(hidden), "eps": 1e-6}

    def add_norm(x: Inputs) -> Call:
        return {"x": x.values(tokens, hidden), "residual": x.values(tokens, hidden), "weight": x.values(hidden), "eps": 1e-6}

    return [
        _single("rms_norm", rows, norm, dtypes=BOTH),
        _single("add_rms_norm", rows, add_norm, dtypes=BOTH),
        _single("rope", per_head, lambda x: {"x": x.values(tokens, heads, dim), **tables(x)}, dtypes=BOTH),
        _single(
            "qk_norm_rope",
            per_head,
            lambda x: {"x": x.values(tokens, heads, dim), "weight": x.values(dim), **tables(x), "eps": 1e-6},
            dtypes=BOTH,
        ),
        _single(
            "swiglu_oai",
            f"{tokens} x 2 x {scale.width}",
            lambda x: {"gate_up": x.values(tokens, 2 * scale.width, scale=4), "alpha": 1.702, "limit": 7.0},
            dtypes=BOTH,
        ),
        _single("write_kv", f"{tokens} x {scale.kv_heads} x {dim}", cached, dtypes=BOTH),
        _single("varlen_attention", f"images of {'+'.join(map(str, scale.images))} patches, 16 x 80", _images(scale.images)),
    ]


def _images(lengths: Sequence[int]) -> Callable[[Inputs], Call]:
    """The vision tower's heads."""

    def make(x: Inputs) -> Call:
        bounds = torch.tensor([0, *lengths]).cumsum(0).int().to(x.device)
        qkv = {name: x.values(sum(lengths), 16, 80) for name in "qkv"}
        return {**qkv, "cu_seqlens": bounds, "scale": 80**-0.5, "max_seqlen": max(lengths)}

    return make


def _experts(scale: Scale) -> list[Benchmark]:
    tokens, top_k = scale.tokens, 4
    lines = [
        _single(
            "route_tokens",
            f"{tokens} x 128",
            lambda x: {
                "logits": x.values(tokens, 128, scale=4),
                "bias": x.values(128, dtype=torch.float32),
                "top_k": top_k,
                "scale": 2.0,
            },
            dtypes=BOTH,
        ),
        _single(
            "permute_tokens",
            f"{tokens} x {scale.hidden}, top {top_k} of 128",
            lambda x: {"x": x.values(tokens, scale.hidden), "ids": x.top(top_k, tokens, 128), "num_experts": 128},
        ),
        _single("unpermute_tokens", f"{tokens} x {scale.hidden}, top {top_k}", lambda x: _sorted_rows(x, tokens, top_k, scale.hidden)),
    ]
    for count in scale.expert_tokens:
        lines += _expert_lines(scale, count, top_k)
    return lines


def _sorted_rows(x: Inputs, tokens: int, top_k: int, hidden: int) -> Call:
    """Rows as permute_tokens leaves them."""
    source = x.top(top_k, tokens, 128).flatten().argsort(stable=True).int()
    return {"rows": x.values(tokens * top_k, hidden), "source": source, "weights": x.values(tokens, top_k, dtype=torch.float32)}


def _expert_lines(scale: Scale, tokens: int, top_k: int) -> list[Benchmark]:
    experts, hidden, width = scale.experts, scale.hidden, scale.width
    note = "" if experts == 128 else f"{experts} of the 128 experts, every token on all of them"
    workload = f"{tokens} tokens on {experts} experts, {hidden} x {width}"

    def weight(x: Inputs, *shape: int) -> Tensor:
        return x.values(*shape, scale=shape[-1] ** -0.5)

    def grouped(x: Inputs) -> Call:
        ends = torch.bincount(x.top(top_k, tokens, experts).flatten(), minlength=experts).cumsum(0)
        offsets = torch.cat([ends.new_zeros(1), ends]).int()
        return {"rows": x.values(tokens * top_k, hidden), "weight": weight(x, experts, 2 * width, hidden), "offsets": offsets}

    def layer(x: Inputs) -> Call:
        return {
            "x": x.values(tokens, hidden, scale=4),
            "weights": x.values(tokens, top_k, dtype=torch.float32),
            "ids": x.top(top_k, tokens, experts),
            "w_gate_up": weight(x, experts, 2 * width, hidden),
            "w_down": weight(x, experts, hidden, width),
            "alpha": 1.702,
            "limit": 7.0,
        }

    return [
        _single("grouped_gemm", workload, grouped, dtypes=BOTH, note=note),
        _single("moe_experts", workload, layer, dtypes=BOTH, note=note),
    ]


def _fp8(scale: Scale) -> list[Benchmark]:
    m, nd, kd = scale.gemm

    def quantised(x: Inputs, rows: int) -> Tensor:
        return x.values(rows, kd, scale=448, dtype=torch.float32).to(FP8)

    def gemm(x: Inputs) -> Call:
        """1 x 128 groups against 128 x 128 blocks, as M3's fp8 layers have them."""
        scales = (m, kd // 128), (nd // 128, kd // 128)
        a_scale, b_scale = (x.values(*shape, dtype=torch.float32).abs() / 448 for shape in scales)
        return {"a": quantised(x, m), "b": quantised(x, nd), "a_scale": a_scale, "b_scale": b_scale, "out_dtype": torch.bfloat16}

    def microscaled(x: Inputs) -> Call:
        return {"w": quantised(x, nd), "scale": x.integers(110, 140, nd, kd // 32).to(torch.uint8)}

    def plain(x: Inputs, granularity: str) -> Call:
        return {"x": x.values(scale.tokens, scale.hidden), "granularity": granularity}

    return [
        *(
            _single("quantize_fp8", f"{kind}, {scale.tokens} x {scale.hidden}", functools.partial(plain, granularity=kind))
            for kind in ("tensor", "row", "group128", "block128")
        ),
        _single("gemm_fp8", f"group128 x block128, {m} x {nd} x {kd}", gemm, note="baseline: its operands lie dequantised already"),
        _single("dequantize_mxfp8", f"{nd} x {kd}", microscaled),
    ]

"""Attention layers against transformers: projections, per-head norm, rope, cache, selection and attention together."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
cache_utils = pytest.importorskip("transformers.cache_utils")

LAYERS = ("full_attention", "minimax_m3_sparse")


class States(NamedTuple):
    """What a layer makes of its tokens: queries, keys, values, index queries and index keys, [T, heads, D] each."""

    q: Tensor
    k: Tensor
    v: Tensor
    index_q: Tensor | None
    index_k: Tensor | None


class Layer:
    """Their attention layer on one side, with nothing after the attention; ours on the other, on its weights."""

    def __init__(self, config: Any, layer_type: str, build: Callable[..., Any], tables: Callable[..., Any]) -> None:
        config.layer_types = [layer_type]
        self.config, self.tables = config, tables
        self.sparse = layer_type == "minimax_m3_sparse"
        self.module = build(modeling.MiniMaxM3VLAttention, config, 0)
        self.module.o_proj = nn.Identity()
        self.rotary = modeling.MiniMaxM3VLRotaryEmbedding(config)

    def theirs(self, hidden_states: Tensor, positions: Tensor, cache: Any = None) -> Tensor:
        """[T, Hq, D] of [T, H]; the cache is their contiguous one."""
        num_keys = int(positions[-1]) + 1
        hidden = torch.arange(num_keys) > positions[:, None]
        mask = torch.zeros(hidden.shape).masked_fill(hidden, torch.finfo(torch.float32).min)[None, None]
        at = self.rotary(hidden_states, positions[None])
        out, _ = self.module(hidden_states[None], at, mask, cache, position_ids=positions[None])
        return out.view(len(positions), -1, self.config.head_dim)

    def states(self, hidden_states: Tensor, positions: Tensor) -> States:
        cos, sin = self.tables(self.config, positions)

        def head_states(projection: nn.Linear, norm: Any, dim: int) -> Tensor:
            heads = projection(hidden_states).view(len(positions), -1, dim)
            return m3_hw.qk_norm_rope(heads, norm.weight, cos, sin, norm.eps)

        module, indexer, dim = self.module, self.module.indexer, self.config.head_dim
        q, k = head_states(module.q_proj, module.q_norm, dim), head_states(module.k_proj, module.k_norm, dim)
        v = module.v_proj(hidden_states).view(len(positions), -1, dim)
        if indexer is None:
            return States(q, k, v, None, None)
        index_q = head_states(indexer.q_proj, indexer.q_norm, indexer.head_dim)
        return States(q, k, v, index_q, head_states(indexer.k_proj, indexer.k_norm, indexer.head_dim)[:, 0])

    def caches(self, pages: Any) -> tuple[Tensor, Tensor, Tensor | None]:
        """Empty paged caches: keys and values head-major, index keys of the sparse layers."""
        shape = (self.config.num_key_value_heads, self.config.head_dim)
        k_cache, v_cache = (pages.empty(*shape).transpose(1, 2).contiguous() for _ in range(2))
        return k_cache, v_cache, pages.empty(self.config.index_head_dim) if self.sparse else None

    def ours(self, states: States, caches: tuple[Tensor, Tensor, Tensor | None], pages: Any, batch: tuple[Tensor, Tensor]) -> Tensor:
        """[T, Hq, D] over what the caches hold."""
        cu_seqlens_q, seq_lens = batch
        most = {"max_seqlen_q": int(cu_seqlens_q.diff().max()), "max_seqlen_k": int(seq_lens.max())}
        k_cache, v_cache, index_k_cache = caches
        where = (pages.block_table, cu_seqlens_q, seq_lens)
        scale = self.config.head_dim**-0.5
        if not self.sparse:
            return m3_hw.dense_attention(states.q, k_cache, v_cache, *where, scale=scale, **most)[0]
        ids = m3_hw.select_blocks(
            states.index_q,
            index_k_cache,
            *where,
            top_k=self.config.index_topk_blocks,
            local_blocks=self.config.index_local_blocks,
            init_blocks=0,
            **most,
        )
        return m3_hw.sparse_attention(states.q, k_cache, v_cache, ids, *where, scale=scale, max_seqlen_q=most["max_seqlen_q"])[0]


@pytest.fixture(params=LAYERS)
def make_layer(request: pytest.FixtureRequest, build: Callable[..., Any], tables: Callable[..., Any]) -> Callable[[Any], Layer]:
    return lambda config: Layer(config, request.param, build, tables)


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5)


def run_in_chunks(layer: Layer, pages: Any, packed: Callable[..., Any], hidden_states: Tensor, cuts: Sequence[int]) -> Any:
    """Outputs of a prefill cut at `cuts`, and the caches that it leaves."""
    caches = layer.caches(pages)
    outputs = []
    for start, stop in pairwise((0, *cuts, len(hidden_states))):
        positions = torch.arange(start, stop)
        states = layer.states(hidden_states[start:stop], positions)
        m3_hw.write_kv(states.k, states.v, states.index_k, *caches, pages.slots(0, positions))
        outputs.append(layer.ours(states, caches, pages, packed([stop - start], [stop])))
    return torch.cat(outputs), caches


@pytest.mark.parametrize("cuts", [(), (200,), (1, 128, 129, 300, 599)], ids=str)
def test_prefill_in_chunks_gives_their_prefill_in_one(
    cuts: tuple[int, ...],
    small: Any,
    make_layer: Callable[[Any], Layer],
    paginate: Callable[..., Any],
    packed: Callable[..., Any],
    random: torch.Generator,
) -> None:
    layer, length = make_layer(small), 600
    hidden_states = torch.randn(length, small.hidden_size, generator=random)
    cache = cache_utils.DynamicCache(config=small)
    expected = layer.theirs(hidden_states, torch.arange(length), cache)
    pages = paginate(length)
    out, (k_cache, v_cache, index_k_cache) = run_in_chunks(layer, pages, packed, hidden_states, cuts)
    assert_close(out, expected)

    for pool, theirs in ((k_cache, cache.layers[0].keys), (v_cache, cache.layers[0].values)):
        assert_close(pages.gather(pool.transpose(1, 2).contiguous(), 0, length), theirs[0].transpose(0, 1))
        assert int(pool.isfinite().sum()) == theirs.numel(), "nothing else was written"
    if layer.sparse:
        assert_close(pages.gather(index_k_cache, 0, length), cache.layers[0].idx_keys[0, 0])


def test_prefill_of_two_sequences_gives_that_of_each(
    small: Any, make_layer: Callable[[Any], Layer], paginate: Callable[..., Any], packed: Callable[..., Any], random: torch.Generator
) -> None:
    layer, lengths = make_layer(small), (390, 515)
    hidden_states = torch.randn(sum(lengths), small.hidden_size, generator=random)
    positions = [torch.arange(length) for length in lengths]
    expected = [layer.theirs(x, at) for x, at in zip(hidden_states.split(lengths), positions, strict=True)]

    pages = paginate(*lengths)
    caches = layer.caches(pages)
    states = layer.states(hidden_states, torch.cat(positions))
    slots = torch.cat([pages.slots(b, at) for b, at in enumerate(positions)])
    m3_hw.write_kv(states.k, states.v, states.index_k, *caches, slots)
    assert_close(layer.ours(states, caches, pages, packed(lengths, lengths)), torch.cat(expected))


@pytest.mark.parametrize("new", [1, 5])
def test_new_tokens_on_a_long_cache(
    new: int,
    config: Any,
    make_layer: Callable[[Any], Layer],
    paginate: Callable[..., Any],
    packed: Callable[..., Any],
    random: torch.Generator,
) -> None:
    """Decode and speculative verify on 19 blocks, of which a sparse layer takes 2 or 16."""
    layer, past = make_layer(config), 18 * 128 + 77
    shape = (past, config.num_key_value_heads, config.head_dim)
    k, v = torch.randn(shape, generator=random), torch.randn(shape, generator=random)
    index_k = torch.randn(past, config.index_head_dim, generator=random) if layer.sparse else None

    cache = cache_utils.DynamicCache(config=config)
    cache.update(k.transpose(0, 1)[None], v.transpose(0, 1)[None], 0)
    if index_k is not None:
        cache.layers[0].update_index(index_k[None, None])
    hidden_states = torch.randn(new, config.hidden_size, generator=random)
    positions = torch.arange(past, past + new)
    expected = layer.theirs(hidden_states, positions, cache)

    pages = paginate(past + new)
    caches = layer.caches(pages)
    m3_hw.write_kv(k, v, index_k, *caches, pages.slots(0, torch.arange(past)))
    states = layer.states(hidden_states, positions)
    m3_hw.write_kv(states.k, states.v, states.index_k, *caches, pages.slots(0, positions))
    assert_close(layer.ours(states, caches, pages, packed([new], [past + new])), expected)
    if layer.sparse:
        everything = m3_hw.dense_attention(
            states.q,
            *caches[:2],
            pages.block_table,
            *packed([new], [past + new]),
            scale=config.head_dim**-0.5,
            max_seqlen_q=new,
            max_seqlen_k=past + new,
        )[0]
        assert (everything - expected).norm() > 0.1 * expected.norm(), "the selection must matter for this to show anything"


def test_attention_over_their_own_selection(
    small: Any, build: Callable[..., Any], tables: Callable[..., Any], paginate: Callable[..., Any], packed: Callable[..., Any], random: Any
) -> None:
    """Their block ids as they come, in the order of the scores: ours must not ask for an order."""
    layer, length = Layer(small, "minimax_m3_sparse", build, tables), 700
    hidden_states, positions = torch.randn(length, small.hidden_size, generator=random), torch.arange(length)
    expected = layer.theirs(hidden_states, positions)
    at = layer.rotary(hidden_states, positions[None])
    ids = layer.module.indexer(hidden_states[None], at, None, positions[None])[0]  # [Hi, T, K]
    assert bool((ids[..., 0] > ids[..., 1]).any())

    states, pages = layer.states(hidden_states, positions), paginate(length)
    caches = [pages.fill([x]).transpose(1, 2).contiguous() for x in (states.k, states.v)]
    out, _ = m3_hw.sparse_attention(
        states.q,
        *caches,
        ids.int(),
        pages.block_table,
        *packed([length], [length]),
        scale=small.head_dim**-0.5,
        max_seqlen_q=length,
    )
    assert_close(out, expected)

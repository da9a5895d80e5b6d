"""Block selection against the indexer of transformers, on contexts where it can be seen: more blocks than are taken."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
cache_utils = pytest.importorskip("transformers.cache_utils")

BLOCK = 128


@pytest.fixture
def sparse(config: Any) -> Any:
    """The config with one layer of sparse attention."""
    config.layer_types = ["minimax_m3_sparse"]
    return config


def embeddings(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    return modeling.MiniMaxM3VLRotaryEmbedding(config)(torch.empty(0), positions[None])


def index_states(indexer: Any, hidden_states: Tensor, position_embeddings: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Their index queries [T, Hi, Di] and keys [T, Di], from [1, T, H]."""
    shape = (*hidden_states.shape[:2], -1, indexer.head_dim)
    q = indexer.q_norm(indexer.q_proj(hidden_states).view(shape))
    k = indexer.k_norm(indexer.k_proj(hidden_states).view(shape))
    q, k = modeling.apply_rotary_pos_emb(q, k, *position_embeddings, unsqueeze_dim=2)
    return q[0], k[0, :, 0]


def assert_same_selection(ours: Tensor, theirs: Tensor, q: Tensor, keys: Tensor, positions: Tensor, local_blocks: int) -> None:
    """Equal sets a row, of [Hi, T, K] ids each; rows may differ in blocks that score as the last one taken does."""
    near_ties = 0
    for h, t in torch.cartesian_prod(torch.arange(ours.shape[0]), torch.arange(ours.shape[1])).tolist():
        row = ours[h, t].tolist()
        valid = [i for i in row if i >= 0]
        assert row == sorted(valid) + [-1] * (len(row) - len(valid)), "ascending, packed left, then -1"
        own = int(positions[t]) // BLOCK
        assert {*range(max(0, own + 1 - local_blocks), own + 1)} <= {*valid}, "local blocks are forced"
        mine, other = set(valid), {i for i in theirs[h, t].tolist() if i >= 0}
        assert len(mine) == len(valid) == len(other)
        if mine != other:
            scores = keys[: positions[t] + 1].double() @ q[t, h].double()
            best = torch.stack([block.max() for block in scores.split(BLOCK)])
            swapped = best[list(mine ^ other)]
            assert swapped.max() - swapped.min() <= 1e-5 * best.abs().max(), f"head {h}, query {t}: {sorted(mine)} against {sorted(other)}"
            near_ties += 1
    assert near_ties <= 0.01 * ours[..., 0].numel()


@pytest.mark.parametrize(("top_k", "local_blocks"), [(2, 1), (3, 2), (4, 0)])
def test_prefill_of_two_sequences(
    small: Any,
    top_k: int,
    local_blocks: int,
    build: Callable[..., Any],
    paginate: Callable[..., Any],
    packed: Callable[..., Any],
    random: torch.Generator,
) -> None:
    small.index_topk_blocks, small.index_local_blocks = top_k, local_blocks
    indexer = build(modeling.MiniMaxM3VLIndexer, small, 0)
    lengths = (900, 517)
    queries, keys, expected = [], [], []
    for length in lengths:
        hidden_states = torch.randn(1, length, small.hidden_size, generator=random)
        at = embeddings(small, torch.arange(length))
        q, k = index_states(indexer, hidden_states, at)
        queries.append(q)
        keys.append(k)
        expected.append(indexer(hidden_states, at, None, torch.arange(length)[None])[0])

    pages = paginate(*lengths)
    ids = m3_hw.select_blocks(
        torch.cat(queries),
        pages.fill(keys),
        pages.block_table,
        *packed(lengths, lengths),
        top_k=top_k,
        local_blocks=local_blocks,
        init_blocks=0,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
    )
    assert ids.shape == (small.index_n_heads, sum(lengths), top_k)
    for b, ours in enumerate(ids.split(lengths, dim=1)):
        assert_same_selection(ours, expected[b], queries[b], keys[b], torch.arange(lengths[b]), local_blocks)
    assert not torch.equal(ids[0], ids[1]), "one list a head, never pooled"


def test_short_rows_are_packed_left(
    small: Any, build: Callable[..., Any], paginate: Callable[..., Any], packed: Callable[..., Any]
) -> None:
    small.index_topk_blocks = 5
    indexer = build(modeling.MiniMaxM3VLIndexer, small, 0)
    hidden_states = torch.ones(1, 300, small.hidden_size)
    at = embeddings(small, torch.arange(300))
    q, k = index_states(indexer, hidden_states, at)
    theirs = indexer(hidden_states, at, None, torch.arange(300)[None])[0]
    pages = paginate(300)
    ids = m3_hw.select_blocks(
        q,
        pages.fill([k]),
        pages.block_table,
        *packed([300], [300]),
        top_k=5,
        local_blocks=1,
        init_blocks=0,
        max_seqlen_q=300,
        max_seqlen_k=300,
    )
    for t, row in ((0, [0]), (127, [0]), (128, [0, 1]), (299, [0, 1, 2])):
        assert ids[:, t].tolist() == [row + [-1] * (5 - len(row))] * small.index_n_heads
        assert {i for i in theirs[0, t].tolist() if i >= 0} == set(row)


def test_new_queries_on_a_long_cache(
    sparse: Any, build: Callable[..., Any], paginate: Callable[..., Any], packed: Callable[..., Any], random: torch.Generator
) -> None:
    """Several queries a request, as speculative verify has them, on 20 blocks: the cache of theirs is contiguous."""
    indexer = build(modeling.MiniMaxM3VLIndexer, sparse, 0)
    past, new = 20 * BLOCK - 3, 9
    old_keys = torch.randn(past, sparse.index_head_dim, generator=random)
    cache = cache_utils.DynamicCache(config=sparse)
    cache.layers[0].update_index(old_keys[None, None])
    hidden_states = torch.randn(1, new, sparse.hidden_size, generator=random)
    positions = torch.arange(past, past + new)
    at = embeddings(sparse, positions)
    q, k = index_states(indexer, hidden_states, at)
    theirs = indexer(hidden_states, at, cache, positions[None])[0]

    keys = torch.cat((old_keys, k))
    pages = paginate(len(keys))
    ids = m3_hw.select_blocks(
        q,
        pages.fill([keys]),
        pages.block_table,
        *packed([new], [len(keys)]),
        top_k=sparse.index_topk_blocks,
        local_blocks=1,
        init_blocks=0,
        max_seqlen_q=new,
        max_seqlen_k=len(keys),
    )
    assert_same_selection(ids, theirs, q, keys, positions, local_blocks=1)

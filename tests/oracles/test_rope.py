"""Rotary embedding of half a head against transformers, alone and after the per-head norm."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

POSITIONS = torch.tensor([0, 1, 5, 127, 128, 2175, 40_000, 524_287, 1_048_575])

Tables = Callable[[Any, Tensor], tuple[Tensor, Tensor]]


def their_tables(config: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """[1, T, R] each: the angles stand there twice, once for each half."""
    return modeling.MiniMaxM3VLRotaryEmbedding(config)(torch.empty(0), positions[None])


def test_tables_have_the_same_bits(config: Any, tables: Tables) -> None:
    for ours, theirs in zip(tables(config, POSITIONS), their_tables(config, POSITIONS), strict=True):
        assert torch.equal(torch.cat((ours, ours), dim=-1), theirs[0])


def test_rope_rotates_the_first_half_of_the_head(config: Any, tables: Tables, random: torch.Generator) -> None:
    q = torch.randn(len(POSITIONS), config.num_attention_heads, config.head_dim, generator=random)
    k = torch.randn(len(POSITIONS), config.num_key_value_heads, config.head_dim, generator=random)
    expected = modeling.apply_rotary_pos_emb(q[None], k[None], *their_tables(config, POSITIONS), unsqueeze_dim=2)
    for x, rotated in zip((q, k), expected, strict=True):
        y = m3_hw.rope(x, *tables(config, POSITIONS))
        torch.testing.assert_close(y, rotated[0], rtol=0, atol=1e-6)
        half = config.head_dim // 2
        assert torch.equal(y[..., half:], x[..., half:])
        assert not torch.equal(y[1:, ..., :half], x[1:, ..., :half])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norm_and_rope_in_one_pass(
    config: Any, dtype: torch.dtype, tables: Tables, build: Callable[..., Any], random: torch.Generator
) -> None:
    norm = build(modeling.MiniMaxM3VLRMSNorm, config.head_dim, 1e-6).to(dtype)
    x = torch.randn(len(POSITIONS), config.num_attention_heads, config.head_dim, generator=random).to(dtype)
    normed = norm(x.float())  # Their module rounds between norm and rope; one pass doesn't.
    expected, _ = modeling.apply_rotary_pos_emb(normed[None], normed[None], *their_tables(config, POSITIONS), unsqueeze_dim=2)
    y = m3_hw.qk_norm_rope(x, norm.weight, *tables(config, POSITIONS), norm.eps)
    assert y.dtype == dtype
    eps = 1e-6 if dtype == torch.float32 else torch.finfo(dtype).eps
    torch.testing.assert_close(y.float(), expected[0], rtol=eps, atol=5e-6)

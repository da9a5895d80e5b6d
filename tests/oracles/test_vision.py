"""The vision tower's rope on 78 of 80 channels and its attention, against transformers."""

import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
configuration = pytest.importorskip("transformers.models.minimax_m3_vl.configuration_minimax_m3_vl")
vision_utils = pytest.importorskip("transformers.vision_utils")

HEAD_DIM, ROTARY_DIM = 80, 78
GRIDS = torch.tensor([[1, 6, 4], [2, 4, 4], [1, 2, 2]])  # frames, height and width in patches: an image, a video, an image


@pytest.fixture(params=(2, 16), ids=("small", "m3_heads"))
def config(request: pytest.FixtureRequest) -> Any:
    """Two of M3's vision heads, or all 16."""
    config = configuration.MiniMaxM3VLVisionConfig(
        hidden_size=request.param * HEAD_DIM, intermediate_size=64, num_hidden_layers=1, num_attention_heads=request.param
    )
    config._attn_implementation = "eager"
    return config


@pytest.fixture
def positions(config: Any) -> Tensor:
    """[T, 3]: frame, row and column of each patch, merge window after merge window."""
    return vision_utils.get_vision_position_ids(GRIDS, config.spatial_merge_size, include_temporal=True)


def tables(positions: Tensor, theta: float = 10_000.0) -> tuple[Tensor, Tensor]:
    """[T, 39] each: 13 frequencies for the frame, the row and the column."""
    per_axis = ROTARY_DIM // 3
    inv_freq = 1.0 / theta ** (torch.arange(0, per_axis, 2, dtype=torch.float32) / per_axis)
    angles = (positions.float()[..., None] * inv_freq).flatten(1)
    return angles.cos(), angles.sin()


def twice(table: Tensor) -> Tensor:
    """As their modules want the angles: once for each half of a pair."""
    return torch.cat((table, table), dim=-1)


def test_tables_have_the_same_bits(config: Any, positions: Tensor) -> None:
    rotary = modeling.MiniMaxM3VLVisionRotaryEmbedding(config)
    if rotary.inv_freq.numel() * 6 != ROTARY_DIM:
        pytest.skip("this transformers rotates all 80 channels by row and column, without the frame: fixed in later releases")
    for ours, theirs in zip(tables(positions), rotary(torch.empty(0), positions), strict=True):
        assert torch.equal(twice(ours), theirs)


def test_rope_leaves_the_last_two_channels(config: Any, positions: Tensor, random: torch.Generator) -> None:
    q, k = (torch.randn(len(positions), config.num_attention_heads, HEAD_DIM, generator=random) for _ in range(2))
    expected = modeling.apply_rotary_pos_emb_vision(q[None], k[None], *(twice(table) for table in tables(positions)))
    for x, rotated in zip((q, k), expected, strict=True):
        y = m3_hw.rope(x, *tables(positions))
        torch.testing.assert_close(y, rotated[0], rtol=0, atol=1e-6)
        assert torch.equal(y[..., ROTARY_DIM:], x[..., ROTARY_DIM:])


def their_attention(module: Any, hidden_states: Tensor, lengths: list[int], at: tuple[Tensor, Tensor]) -> Tensor:
    """[T, C] of [T, C]. Earlier releases take one clip a call, and have no lengths."""
    if "cu_seqlens" in inspect.signature(module.forward).parameters:
        return module(hidden_states, torch.tensor([0, *lengths]).cumsum(0), at)[0]
    clips = zip(hidden_states.split(lengths), *(table.split(lengths) for table in at), strict=True)
    return torch.cat([module(x[None], (cos, sin))[0][0] for x, cos, sin in clips])


def test_attention_within_each_image_and_clip(
    config: Any, positions: Tensor, build: Callable[..., Any], packed: Callable[..., Any], random: torch.Generator
) -> None:
    module = build(modeling.MiniMaxM3VLVisionAttention, config, std=0.05)
    module.out_proj = nn.Identity()
    hidden_states = torch.randn(len(positions), config.hidden_size, generator=random)
    lengths = GRIDS.prod(-1).tolist()
    cos, sin = tables(positions)
    expected = their_attention(module, hidden_states, lengths, (twice(cos), twice(sin)))

    q, k, v = (p(hidden_states).view(len(positions), -1, HEAD_DIM) for p in (module.q_proj, module.k_proj, module.v_proj))
    cu_seqlens, _ = packed(lengths, lengths)
    q, k = m3_hw.rope(q, cos, sin), m3_hw.rope(k, cos, sin)
    out = m3_hw.varlen_attention(q, k, v, cu_seqlens, scale=HEAD_DIM**-0.5, max_seqlen=max(lengths))
    torch.testing.assert_close(out.flatten(1), expected, rtol=1e-5, atol=1e-5)

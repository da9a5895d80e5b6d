"""The MoE block against transformers: activation, router, routed experts, and the block with its shared expert."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")

Build = Callable[..., Any]


@pytest.fixture
def x(config: Any, random: torch.Generator) -> Tensor:
    """Tokens large enough that gate and up leave the clamp, [T, H]."""
    return torch.randn(50, config.hidden_size, generator=random) * 4


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-5, atol=1e-5 * float(expected.abs().max()))


def dense_weights(weights: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """[T, E]: what each expert counts for, whatever the order of the slots."""
    return torch.zeros(weights.shape[0], num_experts).scatter_(1, ids.long(), weights)


def ours(block: Any, x: Tensor, config: Any) -> Tensor:
    """Their MoE block from our operators."""
    gate, experts = block.gate, block.experts
    weights, ids = m3_hw.route_tokens(
        F.linear(x, gate.weight), gate.e_score_correction_bias, top_k=config.num_experts_per_tok, scale=config.routed_scaling_factor
    )
    act = {"alpha": config.swiglu_alpha, "limit": config.swiglu_limit}
    return m3_hw.moe_experts(x, weights, ids, experts.gate_up_proj, experts.down_proj, **act) + mlp(block.shared_experts, x)


def mlp(module: Any, x: Tensor) -> Tensor:
    return module.down_proj(m3_hw.swiglu_oai(module.gate_up_proj(x), module.swiglu_alpha, module.swiglu_limit))


def test_activation_of_the_experts(config: Any, build: Build, random: torch.Generator) -> None:
    experts = build(modeling.MiniMaxM3VLExperts, config)
    gate_up = torch.randn(40, 2 * config.intermediate_size, generator=random) * 6
    assert bool((gate_up.abs() > config.swiglu_limit).any()), "some of both halves must be clamped"
    assert_close(m3_hw.swiglu_oai(gate_up, config.swiglu_alpha, config.swiglu_limit), experts._apply_gate(gate_up))


def test_dense_mlp(config: Any, build: Build, x: Tensor) -> None:
    module = build(modeling.MiniMaxM3VLDenseMLP, config)
    assert_close(mlp(module, x), module(x))


def test_router(config: Any, build: Build, x: Tensor) -> None:
    router = build(modeling.MiniMaxM3VLTopKRouter, config, std=0.1)
    logits, their_weights, their_ids = router(x)
    weights, ids = m3_hw.route_tokens(logits, router.e_score_correction_bias, top_k=config.num_experts_per_tok, scale=1.0)
    assert torch.equal(ids.long().sort(-1).values, their_ids.sort(-1).values)
    assert not torch.equal(their_ids.sort(-1).values, logits.topk(config.num_experts_per_tok).indices.sort(-1).values), (
        "the bias must matter"
    )
    num_experts = config.num_local_experts
    torch.testing.assert_close(
        dense_weights(weights, ids, num_experts), dense_weights(their_weights, their_ids, num_experts), rtol=1e-6, atol=1e-7
    )


def test_routed_experts(config: Any, build: Build, x: Tensor, random: torch.Generator) -> None:
    experts = build(modeling.MiniMaxM3VLExperts, config)
    ids = torch.rand(len(x), config.num_local_experts, generator=random).argsort(-1)[:, : config.num_experts_per_tok]
    weights = torch.rand(ids.shape, generator=random)
    act = {"alpha": config.swiglu_alpha, "limit": config.swiglu_limit}
    y = m3_hw.moe_experts(x, weights, ids.int(), experts.gate_up_proj, experts.down_proj, **act)
    assert_close(y, experts(x, ids, weights))


def test_whole_block_with_its_shared_expert(config: Any, build: Build, x: Tensor) -> None:
    block = build(modeling.MiniMaxM3VLSparseMoeBlock, config)
    assert_close(ours(block, x, config), block(x[None])[0])


@pytest.mark.parametrize("scale", [1.0, 2.826])
def test_block_follows_the_routed_scale_of_the_config(small: Any, scale: float, build: Build, random: torch.Generator) -> None:
    small.routed_scaling_factor = scale
    block = build(modeling.MiniMaxM3VLSparseMoeBlock, small)
    x = torch.randn(20, small.hidden_size, generator=random)
    assert_close(ours(block, x, small), block(x[None])[0])

"""Norms against transformers: the hidden norm, the residual one, and the per-head norm of queries and keys."""

from collections.abc import Callable
from typing import Any

import pytest
import torch

import m3_hw

modeling = pytest.importorskip("transformers.models.minimax_m3_vl.modeling_minimax_m3_vl")
dtypes = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])


def assert_within_an_ulp(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Of the narrow dtypes; both sides compute in fp32, a few ULP of which is the limit for fp32 itself."""
    assert actual.dtype == expected.dtype
    rtol = 1e-6 if actual.dtype == torch.float32 else torch.finfo(actual.dtype).eps
    torch.testing.assert_close(actual, expected, rtol=rtol, atol=0)


@pytest.mark.parametrize("hidden", [64, 6144])
@dtypes
def test_hidden_norm(hidden: int, dtype: torch.dtype, build: Callable[..., Any], random: torch.Generator) -> None:
    norm = build(modeling.MiniMaxM3VLRMSNorm, hidden, 1e-6).to(dtype)
    x = (torch.randn(2, 7, hidden, generator=random) * 3).to(dtype)
    assert_within_an_ulp(m3_hw.rms_norm(x, norm.weight, norm.eps), norm(x))


@dtypes
def test_zero_weight_only_normalises(dtype: torch.dtype, random: torch.Generator) -> None:
    norm = modeling.MiniMaxM3VLRMSNorm(96).to(dtype)  # its weight starts at zero
    x = torch.randn(5, 96, generator=random).to(dtype)
    y = m3_hw.rms_norm(x, norm.weight, norm.eps)
    assert_within_an_ulp(y, norm(x))
    assert y.float().square().mean(-1).sqrt().sub(1).abs().max() < 1e-2


@dtypes
def test_residual_norm_adds_as_the_decoder_layer_does(dtype: torch.dtype, build: Callable[..., Any], random: torch.Generator) -> None:
    norm = build(modeling.MiniMaxM3VLRMSNorm, 192, 1e-6).to(dtype)
    x, residual = (torch.randn(9, 192, generator=random).to(dtype) for _ in range(2))
    y, new_residual = m3_hw.add_rms_norm(x, residual, norm.weight, norm.eps)
    assert torch.equal(new_residual, residual + x)
    assert_within_an_ulp(y, norm(residual + x))


@dtypes
def test_head_norms_of_queries_and_keys(config: Any, dtype: torch.dtype, build: Callable[..., Any], random: torch.Generator) -> None:
    attention = build(modeling.MiniMaxM3VLAttention, config, 0).to(dtype)
    hidden_states = torch.randn(1, 6, config.hidden_size, generator=random).to(dtype)
    for projection, norm in ((attention.q_proj, attention.q_norm), (attention.k_proj, attention.k_norm)):
        heads = projection(hidden_states).view(6, -1, config.head_dim)
        assert_within_an_ulp(m3_hw.rms_norm(heads, norm.weight, norm.eps), norm(heads))

"""Properties of the MoE operators that no single case states: what the bias, the scale and the placement may change."""

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain, pairwise
from random import Random

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import m3_hw

ALPHA, LIMIT, SCALE = 1.702, 7.0, 2.0
# The backend is the same for every example, so that its fixture need not be made anew.
every_example = settings(max_examples=60, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])


@pytest.fixture(params=("reference", "cpu"), autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with m3_hw.use_backend(request.param):
        yield request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260601)


@dataclass
class Experts:
    """Weights of some experts, and the layer that they make."""

    w_gate_up: Tensor  # [E, 2*I, H]
    w_down: Tensor  # [E, H, I]

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        return m3_hw.moe_experts(x, weights, ids, self.w_gate_up, self.w_down, alpha=ALPHA, limit=LIMIT)

    def mlp(self, x: Tensor, expert: int) -> Tensor:
        """One expert on every token."""
        hidden = m3_hw.swiglu_oai(x @ self.w_gate_up[expert].T, ALPHA, LIMIT)
        return hidden @ self.w_down[expert].T

    def placed(self, experts: Tensor) -> "Experts":
        """The weights in the order of a placement: logical expert of each physical one."""
        return Experts(self.w_gate_up[experts], self.w_down[experts])


def make_experts(random: torch.Generator, num_experts: int, hidden: int = 24, width: int = 16) -> Experts:
    def weights(*shape: int) -> Tensor:
        return torch.randn(shape, generator=random, dtype=torch.float64) * 0.3

    return Experts(weights(num_experts, 2 * width, hidden), weights(num_experts, hidden, width))


def route(logits: Tensor, bias: Tensor | None = None, *, top_k: int = 2, scale: float = SCALE) -> tuple[Tensor, Tensor]:
    dtype = torch.float64 if logits.dtype == torch.float64 else torch.float32
    return m3_hw.route_tokens(logits, torch.zeros(logits.shape[1], dtype=dtype) if bias is None else bias, top_k=top_k, scale=scale)


@pytest.mark.parametrize(
    ("num_experts", "top_k"), [(8, 1), (16, 2), (32, 4), (32, 8), (64, 6), (128, 1), (128, 4), (128, 8), (160, 6), (256, 8)]
)
def test_bias_selects_and_unbiased_sigmoids_weigh(num_experts: int, top_k: int, random: torch.Generator) -> None:
    logits = torch.randn(40, num_experts, generator=random)
    bias = torch.randn(num_experts, generator=random)
    weights, ids = route(logits, bias, top_k=top_k)

    scores = logits.double().sigmoid()
    expected = (scores + bias.double()).topk(top_k, dim=-1).indices
    assert torch.equal(ids.long(), expected)
    chosen = scores.gather(-1, expected)
    torch.testing.assert_close(weights.double(), SCALE * chosen / chosen.sum(-1, keepdim=True), rtol=1e-6, atol=0)
    assert not torch.equal(expected, scores.topk(top_k, dim=-1).indices), "the bias must matter for this to show anything"


def test_same_bias_everywhere_changes_nothing(random: torch.Generator) -> None:
    logits = torch.randn(30, 128, generator=random, dtype=torch.float64)
    plain = route(logits, top_k=4)
    shifted = route(logits, torch.full((128,), 3.0, dtype=torch.float64), top_k=4)
    assert torch.equal(plain[0], shifted[0])
    assert torch.equal(plain[1], shifted[1])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_are_read_in_their_own_dtype(dtype: torch.dtype, random: torch.Generator) -> None:
    logits = torch.randn(50, 128, generator=random).to(dtype)
    bias = torch.randn(128, generator=random)
    for narrow, wide in zip(route(logits, bias, top_k=4), route(logits.float(), bias, top_k=4), strict=True):
        assert torch.equal(narrow, wide)


@pytest.mark.parametrize("top_k", [1, 3, 16])
def test_equal_scores_take_the_lower_expert(top_k: int) -> None:
    _, ids = route(torch.zeros(5, 16), top_k=top_k)
    assert ids.tolist() == [list(range(top_k))] * 5


def test_ties_below_the_best_take_the_lower_expert() -> None:
    logits = torch.tensor([[0.0, 1.0, 0.0, 1.0, 2.0, 0.0]])
    assert route(logits, top_k=4)[1].tolist() == [[4, 1, 3, 0]]


@pytest.mark.parametrize("low", [-1e4, -torch.inf])
def test_underflowed_tokens_stay_finite(low: float, random: torch.Generator) -> None:
    logits = torch.full((3, 8), low)
    logits[1] = torch.randn(8, generator=random)
    weights, ids = route(logits, torch.arange(8.0), top_k=4)
    assert ids[0].tolist() == [7, 6, 5, 4], "the bias still selects"
    assert weights[[0, 2]].eq(0).all()
    assert weights[1].sum().item() == pytest.approx(SCALE)
    out = make_experts(random, 8)(torch.ones(3, 24, dtype=torch.float64), weights.double(), ids)
    assert out[[0, 2]].eq(0).all()
    assert out[1].isfinite().all()
    assert out[1].any()


@pytest.mark.parametrize("scale", [1.0, 2.0, 2.826])
def test_router_applies_the_scale_once(scale: float, random: torch.Generator) -> None:
    logits = torch.randn(20, 128, generator=random, dtype=torch.float64)
    weights, ids = route(logits, top_k=4, scale=scale)
    unscaled, same_ids = route(logits, top_k=4, scale=1.0)
    assert torch.equal(ids, same_ids)
    torch.testing.assert_close(weights, unscaled * scale)
    torch.testing.assert_close(weights.sum(-1), torch.full((20,), scale, dtype=torch.float64))


def test_experts_apply_the_weights_and_no_scale(random: torch.Generator) -> None:
    experts = make_experts(random, 4)
    x = torch.randn(9, 24, generator=random, dtype=torch.float64)
    for expert in range(4):
        ids = torch.full((9, 1), expert, dtype=torch.int32)
        once = experts(x, torch.ones(9, 1, dtype=torch.float64), ids)
        torch.testing.assert_close(once, experts.mlp(x, expert))
        torch.testing.assert_close(experts(x, torch.full((9, 1), 0.356, dtype=torch.float64), ids), 0.356 * once)


def test_shared_expert_counts_once_inside_and_outside(random: torch.Generator) -> None:
    routed, shared = 4, 4  # four routed experts, and the shared one as one more row of weights
    experts = make_experts(random, routed + 1)
    x = torch.randn(11, 24, generator=random, dtype=torch.float64)
    weights, ids = route(torch.randn(11, routed, generator=random, dtype=torch.float64))
    outside = experts(x, weights, ids) + experts.mlp(x, shared)

    fused_ids = torch.cat((ids, torch.full((11, 1), shared, dtype=torch.int32)), dim=1)
    fused_weights = torch.cat((weights, torch.ones(11, 1, dtype=torch.float64)), dim=1)
    torch.testing.assert_close(experts(x, fused_weights, fused_ids), outside)


def test_routed_scale_leaves_the_shared_expert_alone(random: torch.Generator) -> None:
    experts = make_experts(random, 5)
    x = torch.randn(7, 24, generator=random, dtype=torch.float64)
    logits = torch.randn(7, 4, generator=random, dtype=torch.float64)

    def layer(scale: float) -> Tensor:
        return experts(x, *route(logits, scale=scale)) + experts.mlp(x, 4)

    torch.testing.assert_close(layer(2.0) - layer(1.0), layer(1.0) - experts.mlp(x, 4))


@pytest.mark.parametrize("used", [(3,), (0,), (7,), (0, 7), (2, 3, 5), ()], ids=str)
def test_experts_without_tokens_are_not_read(used: tuple[int, ...], random: torch.Generator) -> None:
    experts = make_experts(random, 8)
    x = torch.randn(6, 24, generator=random, dtype=torch.float64)
    ids = torch.tensor([used[i % len(used)] if used else -1 for i in range(12)], dtype=torch.int32).view(6, 2)
    weights = torch.rand(6, 2, generator=random, dtype=torch.float64)
    expected = experts(x, weights, ids)
    assert bool(expected.any()) == bool(used)

    idle = torch.ones(8, dtype=torch.bool)
    idle[list(used)] = False
    experts.w_gate_up[idle] = torch.nan
    experts.w_down[idle] = torch.nan
    assert torch.equal(experts(x, weights, ids), expected)


@pytest.mark.parametrize("sizes", [[0, 5, 3], [5, 0, 3], [5, 3, 0], [0, 0, 0], [8, 0, 0]], ids=str)
def test_empty_experts_get_empty_ranges_wherever_they_stand(sizes: list[int]) -> None:
    ids = torch.repeat_interleave(torch.arange(3, dtype=torch.int32), torch.tensor(sizes)).flip(0)[:, None]
    x = torch.arange(ids.shape[0] * 4.0).view(-1, 4)
    rows, source, offsets = m3_hw.permute_tokens(x, ids, 3)
    assert offsets.diff().tolist() == sizes
    weight = torch.arange(1.0, 4)[:, None, None] * torch.eye(4)  # expert e multiplies by e + 1
    y = m3_hw.unpermute_tokens(m3_hw.grouped_gemm(rows, weight, offsets), source, torch.ones(ids.shape))
    assert torch.equal(y, x * (ids + 1))


@given(data=st.data())
@every_example
def test_permute_sorts_stably_and_unpermute_undoes_it(data: st.DataObject) -> None:
    num_tokens, top_k, num_experts = data.draw(st.tuples(st.integers(0, 12), st.integers(1, 5), st.integers(1, 9)))
    values = st.integers(-2, num_experts + 1)  # on both sides: experts of other ranks
    flat = data.draw(st.lists(values, min_size=num_tokens * top_k, max_size=num_tokens * top_k))
    ids = torch.tensor(flat, dtype=torch.int32).view(num_tokens, top_k)
    x = torch.arange(1.0, num_tokens * 3 + 1).view(num_tokens, 3)
    rows, source, offsets = m3_hw.permute_tokens(x, ids, num_experts)

    by_expert = [[i for i, e in enumerate(flat) if e == expert] for expert in range(num_experts)]
    kept = list(chain.from_iterable(by_expert))
    assert source.tolist() == kept + [-1] * (len(flat) - len(kept))
    assert offsets.diff().tolist() == [len(slots) for slots in by_expert]
    assert torch.equal(rows[: len(kept)], x[[i // top_k for i in kept]])
    assert rows[len(kept) :].eq(0).all()

    weights = torch.arange(1.0, len(flat) + 1).view(num_tokens, top_k)  # integers: every sum is exact
    owned = (ids >= 0) & (ids < num_experts)
    assert torch.equal(m3_hw.unpermute_tokens(rows, source, weights), x * (weights * owned).sum(-1, keepdim=True))


@given(rows=st.permutations(range(12)), dropped=st.sets(st.integers(0, 11)))
@every_example
def test_order_of_rows_does_not_change_a_bit_of_the_sum(rows: list[int], dropped: set[int]) -> None:
    random = torch.Generator().manual_seed(7)
    outputs, weights = torch.randn(12, 5, generator=random), torch.rand(4, 3, generator=random)
    source = torch.tensor([-1 if i in dropped else i for i in range(12)], dtype=torch.int32)
    expected = m3_hw.unpermute_tokens(outputs, source, weights)
    assert torch.equal(m3_hw.unpermute_tokens(outputs[list(rows)], source[list(rows)], weights), expected)


@given(placement=st.permutations(range(8)))
@every_example
def test_any_placement_of_the_experts_gives_the_same_bits(placement: list[int]) -> None:
    random = torch.Generator().manual_seed(11)
    experts, x = make_experts(random, 8), torch.randn(13, 24, generator=random, dtype=torch.float64)
    weights, ids = route(torch.randn(13, 8, generator=random, dtype=torch.float64), top_k=3)
    physical = torch.tensor(placement)
    position = torch.argsort(physical).int()
    assert torch.equal(experts.placed(physical)(x, weights, position[ids.long()]), experts(x, weights, ids))


@given(replicas=st.lists(st.integers(0, 7), max_size=16), choices=st.randoms(use_true_random=False))
@every_example
def test_any_choice_among_replicas_gives_the_same_output(replicas: list[int], choices: Random) -> None:
    random = torch.Generator().manual_seed(13)
    experts, x = make_experts(random, 8), torch.randn(13, 24, generator=random, dtype=torch.float64)
    weights, ids = route(torch.randn(13, 8, generator=random, dtype=torch.float64), top_k=3)
    physical = [*range(8), *replicas]
    copies = [[p for p, logical in enumerate(physical) if logical == expert] for expert in range(8)]
    chosen = torch.tensor([[choices.choice(copies[e]) for e in row] for row in ids.tolist()], dtype=torch.int32)
    # Not bit for bit: a replica changes how many rows a matrix product has, and BLAS its order of sums with that.
    torch.testing.assert_close(experts.placed(torch.tensor(physical))(x, weights, chosen), experts(x, weights, ids), rtol=0, atol=1e-13)


@given(bounds=st.lists(st.integers(0, 8), max_size=4))
@every_example
def test_ranks_of_an_expert_parallel_group_sum_up_to_the_layer(bounds: list[int]) -> None:
    random = torch.Generator().manual_seed(17)
    experts, x = make_experts(random, 8), torch.randn(13, 24, generator=random, dtype=torch.float64)
    weights, ids = route(torch.randn(13, 8, generator=random, dtype=torch.float64), top_k=3)
    cuts = sorted({0, *bounds, 8})
    parts = [
        experts.placed(torch.arange(first, last))(x, weights, ids - first)  # ids of other ranks fall outside
        for first, last in pairwise(cuts)
    ]
    torch.testing.assert_close(torch.stack(parts).sum(0), experts(x, weights, ids), rtol=0, atol=1e-13)

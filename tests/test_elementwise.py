"""What norms, rope, activation and cache writes must hold beyond being close to their reference."""

import math
from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

import m3_hw
from m3_hw.errors import ContractError

ALPHA, LIMIT, EPS = 1.702, 7.0, 1e-6
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
HEADS = {"text": (128, 64), "vision": (80, 78), "whole head": (64, 64)}  # D, R


@pytest.fixture(params=("reference", "cpu"), autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with m3_hw.use_backend(request.param):
        yield request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260602)


def tables(positions: Tensor, num_rotary: int) -> tuple[Tensor, Tensor]:
    """cos and sin [T, R/2] of M3's text rope."""
    inv_freq = 5e6 ** (-torch.arange(0, num_rotary, 2, dtype=torch.float64) / num_rotary)
    angles = positions.double()[:, None] * inv_freq
    return angles.cos().float(), angles.sin().float()


def bits(x: Tensor) -> Tensor:
    return x.contiguous().view(torch.uint8)


class TestSwigluOai:
    @pytest.mark.parametrize(("gate", "up", "wanted"), [(1.0, 0.0, 0.845796), (10.0, 0.0, 6.999953), (0.5, -1.0, 0.0)])
    def test_c06_alpha_limit_and_the_added_one_all_count(self, gate: float, up: float, wanted: float) -> None:
        y = m3_hw.swiglu_oai(torch.tensor([[gate, up]]), ALPHA, LIMIT)
        assert y.item() == pytest.approx(wanted, abs=1e-6)

    def test_c06_alpha_and_limit_have_no_defaults(self) -> None:
        with pytest.raises(RuntimeError, match="alpha"):
            m3_hw.swiglu_oai(torch.zeros(1, 2))  # type: ignore[call-arg]
        with pytest.raises(RuntimeError, match="limit"):
            m3_hw.swiglu_oai(torch.zeros(1, 2), ALPHA)  # type: ignore[call-arg]

    @pytest.mark.parametrize("limit", [0.0, -7.0, math.inf, math.nan])
    def test_c06_limit_that_is_no_limit_is_refused(self, limit: float) -> None:
        with pytest.raises(ContractError, match="limit"):
            m3_hw.swiglu_oai(torch.zeros(1, 2), ALPHA, limit)

    def test_halves_are_not_interleaved(self) -> None:
        gate, up = torch.tensor([1.0, 2.0, 3.0]), torch.tensor([-0.5, 0.25, 4.0])
        wanted = (up + 1) * gate * torch.sigmoid(ALPHA * gate)
        assert torch.allclose(m3_hw.swiglu_oai(torch.cat([gate, up])[None], ALPHA, LIMIT), wanted[None], atol=1e-6)

    def test_gate_is_clamped_from_above_only_and_up_from_both_sides(self) -> None:
        def one(gate: float, up: float) -> float:
            return float(m3_hw.swiglu_oai(torch.tensor([[gate, up]]), ALPHA, LIMIT))

        assert one(50.0, 1.0) == one(LIMIT, 1.0)
        assert one(2.0, 50.0) == one(2.0, LIMIT)
        assert one(2.0, -50.0) == one(2.0, -LIMIT)
        assert one(-9.0, 1.0) != one(-LIMIT, 1.0)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_what_is_not_finite_is_clamped_or_shows(self, value: float) -> None:
        gate_first, up_first = m3_hw.swiglu_oai(torch.tensor([[value, 1.0], [1.0, value]]), ALPHA, LIMIT).flatten().tolist()
        assert math.isnan(gate_first) == (value != math.inf)  # -inf * sigmoid(-inf) has no value
        assert math.isnan(up_first) == math.isnan(value)

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_no_tokens(self, dtype: torch.dtype) -> None:
        y = m3_hw.swiglu_oai(torch.zeros(0, 12, dtype=dtype), ALPHA, LIMIT)
        assert y.shape == (0, 6)
        assert y.dtype == dtype


class TestRope:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("head", ["text", "vision"])
    def test_c09_c75_channels_past_r_keep_their_bits(self, head: str, dtype: torch.dtype, random: torch.Generator) -> None:
        dim, num_rotary = HEADS[head]
        x = torch.randn(6, 3, dim, generator=random).to(dtype)
        integers = torch.int32 if dtype == torch.float32 else torch.int16
        x[0, 0, -1], x[1, 0, -1] = math.nan, -0.0
        x.view(integers)[2, 0, -1] |= 0x7FC1 if dtype == torch.bfloat16 else 0x7F800001 if dtype == torch.float32 else 0x7E01  # NaN bits
        y = m3_hw.rope(x, *tables(torch.arange(5, 11), num_rotary))
        assert torch.equal(bits(y[..., num_rotary:]), bits(x[..., num_rotary:]))
        assert not torch.equal(y[..., :num_rotary], x[..., :num_rotary])

    @pytest.mark.parametrize("head", HEADS)
    def test_c09_channel_i_turns_with_channel_i_plus_half_of_r(self, head: str) -> None:
        dim, num_rotary = HEADS[head]
        half = num_rotary // 2
        cos, sin = tables(torch.tensor([5]), num_rotary)
        for i in (0, 1, half - 1):
            x = torch.zeros(1, 1, dim)
            x[0, 0, i] = 1
            wanted = torch.zeros(dim)
            wanted[i], wanted[i + half] = cos[0, i], sin[0, i]
            assert torch.equal(m3_hw.rope(x, cos, sin)[0, 0], wanted)

    def test_c09_a_quarter_turn_moves_the_first_channel_forward(self) -> None:
        x = torch.tensor([[[1.0, 0.0, 9.0], [0.0, 1.0, 9.0]]])
        y = m3_hw.rope(x, torch.zeros(1, 1), torch.ones(1, 1))
        assert y.tolist() == [[[0.0, 1.0, 9.0], [-1.0, 0.0, 9.0]]]

    @pytest.mark.parametrize("head", HEADS)
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_c76_norms_are_kept(self, head: str, dtype: torch.dtype, random: torch.Generator) -> None:
        dim, num_rotary = HEADS[head]
        x = torch.randn(9, 4, dim, generator=random).to(dtype)
        y = m3_hw.rope(x, *tables(torch.arange(9) * 117_649, num_rotary))
        before, after = (t.double().norm(dim=-1) for t in (x, y))
        assert ((after - before).abs() <= torch.finfo(dtype).eps * before).all()

    def test_angles_differ_between_the_first_and_the_second_position(self, random: torch.Generator) -> None:
        """Dot products of rotated heads depend on the distance alone: the point of a rope."""
        q, k = torch.randn(2, 1, 1, 128, generator=random).double().unbind(0)

        def score(a: int, b: int) -> float:
            turned = [m3_hw.rope(x, *(t.double() for t in tables(torch.tensor([p]), 64))) for x, p in ((q, a), (k, b))]
            return float((turned[0] * turned[1]).sum())

        assert score(3, 1) == pytest.approx(score(1003, 1001), abs=1e-4)
        assert score(3, 1) != pytest.approx(score(3, 2), abs=1e-2)

    def test_c75_interleaved_tables_of_the_head_size_are_refused(self) -> None:
        with pytest.raises(ContractError, match="cos"):
            m3_hw.rope(torch.zeros(2, 1, 64), torch.zeros(2, 64), torch.zeros(2, 64))

    def test_no_tokens(self) -> None:
        assert m3_hw.rope(torch.zeros(0, 4, 80), torch.zeros(0, 39), torch.zeros(0, 39)).shape == (0, 4, 80)


class TestNorms:
    @pytest.mark.parametrize("dtype", DTYPES)
    def test_c73_weight_of_zero_gives_x_over_its_rms(self, dtype: torch.dtype, random: torch.Generator) -> None:
        x = torch.randn(5, 2, 64, generator=random).to(dtype)
        zero, nothing = torch.zeros(64, dtype=dtype), torch.zeros_like(x)
        wanted = (x.double() / (x.double().square().mean(-1, keepdim=True) + EPS).sqrt()).to(dtype)
        cos, sin = torch.ones(5, 16), torch.zeros(5, 16)
        for y in (
            m3_hw.rms_norm(x, zero, EPS),
            m3_hw.add_rms_norm(x, nothing, zero, EPS)[0],
            m3_hw.qk_norm_rope(x, zero, cos, sin, EPS),
        ):
            assert torch.allclose(y.double(), wanted.double(), rtol=2 * torch.finfo(dtype).eps, atol=0)

    def test_c73_one_is_added_once_and_not_in_the_dtype_of_the_weight(self) -> None:
        x = torch.tensor([[3.0, 1.0]], dtype=torch.bfloat16)
        weight = torch.full((2,), 2.0**-8, dtype=torch.bfloat16)  # 1 + 2^-8 would round to 1
        small = 5**-0.5  # what 1 is among these two
        cos, sin = torch.ones(1, 1), torch.zeros(1, 1)
        for y in (
            m3_hw.rms_norm(x, weight, EPS),
            m3_hw.add_rms_norm(x, torch.zeros_like(x), weight, EPS)[0],
            m3_hw.qk_norm_rope(x[None], weight, cos, sin, EPS)[0],
        ):
            assert y[0, 1] == torch.tensor(small * (1 + 2.0**-8)).bfloat16() != torch.tensor(small).bfloat16()

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_norm_is_of_the_sum_as_it_is_stored(self, dtype: torch.dtype, random: torch.Generator) -> None:
        x, residual = (torch.randn(7, 96, generator=random).to(dtype) for _ in range(2))
        weight = torch.randn(96, generator=random).to(dtype)
        y, new_residual = m3_hw.add_rms_norm(x, 37 * residual, weight, EPS)
        assert torch.equal(new_residual, x + 37 * residual)
        assert torch.equal(y, m3_hw.rms_norm(new_residual, weight, EPS))

    def test_residual_is_not_written(self, random: torch.Generator) -> None:
        x, residual = torch.randn(2, 3, 8, generator=random).unbind(0)
        before = residual.clone()
        _, new_residual = m3_hw.add_rms_norm(x, residual, torch.zeros(8), EPS)
        assert torch.equal(residual, before)
        assert new_residual.data_ptr() != residual.data_ptr()

    def test_rows_of_zeros_give_zeros(self) -> None:
        x = torch.zeros(2, 3, 16)
        for y in (
            m3_hw.add_rms_norm(x, x, torch.ones(16), EPS)[0],
            m3_hw.qk_norm_rope(x, torch.ones(16), torch.ones(2, 4), torch.ones(2, 4), EPS),
        ):
            assert not y.any()

    def test_a_head_is_normalised_by_itself(self, random: torch.Generator) -> None:
        x = torch.randn(3, 4, 32, generator=random)
        arguments = torch.randn(32, generator=random), *tables(torch.arange(3), 16), EPS
        scaled = x * torch.tensor([1.0, 64.0, 0.25, 8.0])[:, None]
        y = m3_hw.qk_norm_rope(scaled, *arguments)
        assert torch.allclose(y, m3_hw.qk_norm_rope(x, *arguments), atol=1e-4)

    @pytest.mark.parametrize("head", HEADS)
    def test_one_pass_is_norm_then_rope(self, head: str, random: torch.Generator) -> None:
        dim, num_rotary = HEADS[head]
        x, weight = torch.randn(5, 3, dim, generator=random), torch.randn(dim, generator=random)
        cos, sin = tables(torch.arange(5) + 1000, num_rotary)
        two_passes = m3_hw.rope(m3_hw.rms_norm(x, weight, EPS), cos, sin)
        assert torch.allclose(m3_hw.qk_norm_rope(x, weight, cos, sin, EPS), two_passes, atol=1e-5)

    def test_nothing_is_rounded_between_norm_and_rope(self, random: torch.Generator) -> None:
        x, weight = torch.randn(64, 4, 128, generator=random).bfloat16(), torch.randn(128, generator=random).bfloat16()
        cos, sin = tables(torch.arange(64), 64)
        wide = m3_hw.qk_norm_rope(x.float(), weight.float(), cos, sin, EPS)
        assert torch.equal(m3_hw.qk_norm_rope(x, weight, cos, sin, EPS), wide.bfloat16())

    def test_no_rows(self) -> None:
        y, new_residual = m3_hw.add_rms_norm(torch.zeros(0, 8), torch.zeros(0, 8), torch.zeros(8), EPS)
        assert y.shape == new_residual.shape == (0, 8)
        assert m3_hw.qk_norm_rope(torch.zeros(0, 2, 8), torch.zeros(8), torch.zeros(0, 2), torch.zeros(0, 2), EPS).shape == (0, 2, 8)


class TestWriteKv:
    HEADS, DIM, INDEX_DIM, PAGES = 3, 16, 8, 4

    def rows(self, random: torch.Generator, num_tokens: int) -> list[Tensor]:
        """k, v and index_k."""
        shapes = ((num_tokens, self.HEADS, self.DIM), (num_tokens, self.HEADS, self.DIM), (num_tokens, self.INDEX_DIM))
        return [torch.randn(shape, generator=random) for shape in shapes]

    def caches(self, random: torch.Generator) -> list[Tensor]:
        """k_cache, v_cache and index_k_cache."""
        shapes = ((self.PAGES, self.HEADS, 128, self.DIM), (self.PAGES, self.HEADS, 128, self.DIM), (self.PAGES, 128, self.INDEX_DIM))
        return [torch.randn(shape, generator=random) for shape in shapes]

    def test_slot_is_page_times_128_plus_offset_and_the_rest_keeps_its_bits(self, random: torch.Generator) -> None:
        rows, caches = self.rows(random, 4), self.caches(random)
        wanted = [cache.clone() for cache in caches]
        slots = [3 * 128 + 127, 0, 128, 2 * 128 + 5]
        for t, slot in enumerate(slots):
            page, offset = divmod(slot, 128)
            for row, cache in zip(rows[:2], wanted[:2], strict=True):
                for h in range(self.HEADS):
                    cache[page, h, offset] = row[t, h]
            wanted[2][page, offset] = rows[2][t]
        m3_hw.write_kv(*rows, *caches, torch.tensor(slots))
        for cache, want in zip(caches, wanted, strict=True):
            assert torch.equal(cache, want)

    def test_slot_minus_one_skips_the_row(self, random: torch.Generator) -> None:
        rows, caches = self.rows(random, 3), self.caches(random)
        expected = [cache.clone() for cache in caches]
        m3_hw.write_kv(*(row[1:2] for row in rows), *expected, torch.tensor([200]))
        for row in rows:
            row[0], row[2] = math.nan, math.inf
        m3_hw.write_kv(*rows, *caches, torch.tensor([-1, 200, -1]))
        for cache, want in zip(caches, expected, strict=True):
            assert torch.equal(cache, want)

    @pytest.mark.parametrize("slots", [[], [-1, -1]])
    def test_nothing_to_write(self, slots: list[int], random: torch.Generator) -> None:
        rows, caches = self.rows(random, len(slots)), self.caches(random)
        before = [cache.clone() for cache in caches]
        m3_hw.write_kv(*rows, *caches, torch.tensor(slots, dtype=torch.int64))
        for cache, want in zip(caches, before, strict=True):
            assert torch.equal(cache, want)

    def test_layers_without_an_index_take_none(self, random: torch.Generator) -> None:
        (k, v, _), (k_cache, v_cache, _) = self.rows(random, 2), self.caches(random)
        m3_hw.write_kv(k, v, None, k_cache, v_cache, None, torch.tensor([7, 300]))
        assert torch.equal(k_cache[2, :, 300 - 256], k[1])

    def test_c11_keys_without_their_index_keys_are_refused(self, random: torch.Generator) -> None:
        (k, v, index_k), (k_cache, v_cache, index_k_cache) = self.rows(random, 2), self.caches(random)
        slots = torch.tensor([7, 300])
        with pytest.raises(ContractError, match="index_k "):
            m3_hw.write_kv(k, v, None, k_cache, v_cache, index_k_cache, slots)
        with pytest.raises(ContractError, match="index_k "):
            m3_hw.write_kv(k, v, index_k[:1], k_cache, v_cache, index_k_cache, slots)

    def test_strided_caches_and_rows(self, random: torch.Generator) -> None:
        """One pool with keys and values side by side, heads innermost: only strides tell."""
        rows, caches = self.rows(random, 3), self.caches(random)
        slots = torch.tensor([5, -1, 511])
        pool = torch.zeros(self.PAGES, 128, 2, self.HEADS, self.DIM)
        views = [pool[:, :, i].transpose(1, 2) for i in range(2)]
        index_view = torch.zeros(self.INDEX_DIM, 128, self.PAGES).permute(2, 1, 0)
        strided_rows = [torch.stack([row, row.flip(0)], dim=-1)[..., 0] for row in rows]
        for view, cache in zip((*views, index_view), caches, strict=True):
            view.copy_(cache)
        m3_hw.write_kv(*strided_rows, *views, index_view, slots)
        m3_hw.write_kv(*rows, *caches, slots)
        for view, cache in zip((*views, index_view), caches, strict=True):
            assert torch.equal(view, cache)

    @pytest.mark.parametrize("bad", [[0, 4 * 128], [0, -2], [9, 9], [0, 1 << 40]])
    def test_failed_write_leaves_the_caches_untouched(self, bad: list[int], random: torch.Generator) -> None:
        rows, caches = self.rows(random, 2), self.caches(random)
        before = [cache.clone() for cache in caches]
        with pytest.raises(ContractError, match="slots"):
            m3_hw.write_kv(*rows, *caches, torch.tensor(bad))
        for cache, want in zip(caches, before, strict=True):
            assert torch.equal(cache, want)

    def test_c43_a_refused_index_cache_leaves_the_others_untouched(self, random: torch.Generator) -> None:
        rows, (k_cache, v_cache, index_k_cache) = self.rows(random, 2), self.caches(random)
        before = k_cache.clone()
        with pytest.raises(ContractError, match="index_k_cache"):
            m3_hw.write_kv(*rows, k_cache, v_cache, index_k_cache[:, None], torch.tensor([0, 1]))
        assert torch.equal(k_cache, before)

    def test_c47_a_page_that_starts_past_two_to_the_31(self) -> None:
        """Page 1 lies 2^31 elements behind page 0; what is between them is never touched, so it takes no memory."""
        storage = torch.empty(2**31 + 2 * 128 * 64, dtype=torch.float8_e4m3fn)
        k_cache, v_cache = (storage.as_strided((2, 1, 128, 64), (2**31, 128 * 64, 64, 1), i * 128 * 64) for i in range(2))
        for cache in (k_cache, v_cache):
            cache.copy_(torch.zeros(cache.shape))
        k = torch.ones(1, 1, 64)
        m3_hw.write_kv(k, 2 * k, None, k_cache, v_cache, None, torch.tensor([128 + 3]))
        for cache, value in ((k_cache, 1), (v_cache, 2)):
            assert cache[1, 0, 3].float().eq(value).all()
            assert cache.float().sum() == 64 * value


def test_swiglu_of_the_fused_projection_is_that_of_two(random: torch.Generator) -> None:
    x, weight = torch.randn(4, 32, generator=random), torch.randn(48, 32, generator=random) / 6
    gate, up = F.linear(x, weight[:24]), F.linear(x, weight[24:])
    wanted = (up.clamp(-LIMIT, LIMIT) + 1) * gate.clamp(max=LIMIT) * torch.sigmoid(ALPHA * gate.clamp(max=LIMIT))
    assert torch.allclose(m3_hw.swiglu_oai(F.linear(x, weight), ALPHA, LIMIT), wanted, atol=1e-5)

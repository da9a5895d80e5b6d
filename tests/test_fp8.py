"""Caches, quantisation and products in fp8, bit by bit against numpy with ml_dtypes, which shares no code with torch."""

import math
from collections.abc import Iterator

import ml_dtypes
import numpy as np
import pytest
import torch
from torch import Tensor

import m3_hw
from m3_hw.errors import ContractError

FP8 = torch.float8_e4m3fn
OTHER_FP8 = (torch.float8_e4m3fnuz, torch.float8_e5m2, torch.float8_e5m2fnuz)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
GRANULARITIES = {"tensor": (None, None), "row": (1, None), "group128": (1, 128), "block128": (128, 128)}
"""Rows and columns that share a scale; None: all."""


@pytest.fixture(params=("reference", "cpu"), autouse=True)
def backend(request: pytest.FixtureRequest) -> Iterator[str]:
    with m3_hw.use_backend(request.param):
        yield request.param


@pytest.fixture
def random() -> torch.Generator:
    return torch.Generator().manual_seed(20260603)


def fp8_bits(x: Tensor) -> np.ndarray:
    return x.contiguous().view(torch.uint8).numpy()


def decoded(x: Tensor) -> np.ndarray:
    """fp8 e4m3fn in float64."""
    return fp8_bits(x).view(ml_dtypes.float8_e4m3fn).astype(np.float64)


def rounded(values: np.ndarray) -> np.ndarray:
    """Bits of float32 values in fp8 e4m3fn, clamped."""
    return np.clip(values, -448, 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8)


def finite_fp8() -> np.ndarray:
    """Every finite value of e4m3fn, ascending, each once, in float32."""
    every = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    return np.unique(every[np.isfinite(every)])


def same_scale(x: np.ndarray, granularity: str) -> Iterator[tuple[int, int, tuple[slice, slice]]]:
    """The place of each scale, and the part of x that has it."""
    rows, columns = (size or max(length, 1) for size, length in zip(GRANULARITIES[granularity], x.shape, strict=True))
    for i in range(0, x.shape[0], rows):
        for j in range(0, x.shape[1], columns):
            yield i // rows, j // columns, (slice(i, i + rows), slice(j, j + columns))


class TestWriteKv:
    def stored(self, values: Tensor, scale: float = 1.0) -> Tensor:
        """What k, v and index_k caches hold after a write; all three must agree."""
        caches = [torch.zeros(2, 1, 128, len(values)).to(FP8) for _ in range(2)]
        index_cache = torch.zeros(2, 128, len(values)).to(FP8)
        row = values[None]  # [1, D]
        scales = dict.fromkeys(("k_scale", "v_scale", "index_k_scale"), scale)
        m3_hw.write_kv(row[None], row[None], row, *caches, index_cache, torch.tensor([128 + 7]), **scales)
        k, v, index_k = caches[0][1, 0, 7], caches[1][1, 0, 7], index_cache[1, 7]
        assert (fp8_bits(k) == fp8_bits(v)).all()
        assert (fp8_bits(k) == fp8_bits(index_k)).all()
        return k

    @pytest.mark.parametrize("dtype", DTYPES)
    def test_c45_what_is_too_large_is_stored_as_448_and_never_as_nan(self, dtype: torch.dtype) -> None:
        values = torch.tensor([500.0, -500.0, 448.0, 464.0, 65504.0, math.inf, -math.inf], dtype=dtype)
        assert self.stored(values).float().tolist() == [448, -448, 448, 448, 448, 448, -448]

    def test_nan_stays_nan(self) -> None:
        assert self.stored(torch.tensor([math.nan, 1.0])).float().isnan().tolist() == [True, False]

    def test_values_are_rounded_once_to_nearest_even(self) -> None:
        """Every value, every midpoint, and both neighbours of each in float32."""
        exact = finite_fp8()
        points = np.concatenate([exact, (exact[1:] + exact[:-1]) / 2])
        points = np.concatenate([points, np.nextafter(points, np.float32(np.inf)), np.nextafter(points, np.float32(-np.inf))])
        assert (fp8_bits(self.stored(torch.from_numpy(points))) == rounded(points)).all()

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("scale", [0.5, 0.3, 1 / 3, 7.0])
    def test_values_are_divided_by_the_scale_in_float32(self, scale: float, dtype: torch.dtype, random: torch.Generator) -> None:
        values = (100 * torch.randn(4096, generator=random)).to(dtype)
        wanted = rounded(values.float().numpy() / np.float32(scale))
        assert (fp8_bits(self.stored(values, scale)) == wanted).all()

    def test_division_that_a_reciprocal_would_round_otherwise(self) -> None:
        """Quotients at the midpoints of fp8: x * (1 / scale) leaves some of them for a neighbour."""
        scale = np.float32(0.3)
        midpoints = ((finite_fp8()[1:] + finite_fp8()[:-1]) / 2).astype(np.float32)
        values = midpoints * scale
        values = np.concatenate([values, np.nextafter(values, np.float32(np.inf)), np.nextafter(values, np.float32(-np.inf))])
        by_reciprocal = rounded(values * (np.float32(1) / scale))
        wanted = rounded(values / scale)
        assert (by_reciprocal != wanted).any()
        assert (fp8_bits(self.stored(torch.from_numpy(values), float(scale))) == wanted).all()

    def test_c05_bytes_mean_something_else_in_the_other_e4m3(self) -> None:
        """Why a cache's dtype must travel with it."""
        same = torch.tensor([0x38, 0x80], dtype=torch.uint8)
        assert same.view(FP8).float().tolist() == [1.0, 0.0]
        half, not_a_number = same.view(torch.float8_e4m3fnuz).float().tolist()
        assert half == 0.5
        assert math.isnan(not_a_number)

    @pytest.mark.parametrize("other", OTHER_FP8)
    @pytest.mark.parametrize("place", ["k_cache", "v_cache", "index_k_cache"])
    def test_c05_caches_of_another_fp8_are_refused(self, place: str, other: torch.dtype) -> None:
        caches = {"k_cache": torch.zeros(1, 1, 128, 8), "v_cache": torch.zeros(1, 1, 128, 8), "index_k_cache": torch.zeros(1, 128, 8)}
        caches = {name: cache.to(other if name == place else FP8) for name, cache in caches.items()}
        k = torch.ones(1, 1, 8)
        with pytest.raises(ContractError, match=f"{place} has dtype float8.*accepted: .*float8_e4m3fn"):
            m3_hw.write_kv(k, k, k[0], *caches.values(), torch.tensor([0]))
        assert not any(cache.float().any() for cache in caches.values())

    @pytest.mark.parametrize("scale", [0.0, -1.0, math.inf, math.nan])
    def test_scale_that_is_no_scale_is_refused(self, scale: float) -> None:
        with pytest.raises(ContractError, match="k_scale"):
            self.stored(torch.ones(4), scale)

    def test_scale_of_a_cache_that_is_not_fp8_is_refused(self) -> None:
        k, cache = torch.ones(1, 1, 4), torch.zeros(1, 1, 128, 4)
        with pytest.raises(ContractError, match=r"v_scale has value 0\.5"):
            m3_hw.write_kv(k, k, None, cache, cache.clone(), None, torch.tensor([0]), v_scale=0.5)

    def test_strided_fp8_caches(self, random: torch.Generator) -> None:
        pool = torch.zeros(3, 128, 2, 2, 8).to(FP8)  # pages, offsets, k and v, heads, channels
        k_cache, v_cache = (pool[:, :, i].transpose(1, 2) for i in range(2))
        k, v = 1000 * torch.randn(2, 4, 2, 8, generator=random)
        slots = torch.tensor([300, -1, 0, 129])
        m3_hw.write_kv(k, v, None, k_cache, v_cache, None, slots)
        for i, rows in enumerate((k, v)):
            for t in (0, 2, 3):
                page, offset = divmod(int(slots[t]), 128)
                assert (fp8_bits(pool[page, offset, i]) == rounded(rows[t].numpy())).all()
        assert pool.float().ne(0).sum() == 2 * 3 * 16


class TestQuantizeFp8:
    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_every_group_is_scaled_by_its_own_largest_value(self, granularity: str, dtype: torch.dtype, random: torch.Generator) -> None:
        x = (torch.randn(150, 300, generator=random) * torch.randn(150, 300, generator=random).exp()).to(dtype)
        y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
        values = x.float().numpy()
        parts = list(same_scale(values, granularity))
        assert scale.shape == (parts[-1][0] + 1, parts[-1][1] + 1)
        for i, j, part in parts:
            wanted = np.abs(values[part]).max() / np.float32(448)
            assert scale[i, j].item() == wanted
            assert (fp8_bits(y[part]) == rounded(values[part] / wanted)).all()
            assert np.abs(decoded(y[part])).max() == 448

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_c63_a_group_beside_others_is_quantised_as_it_is_alone(self, granularity: str, random: torch.Generator) -> None:
        x = torch.randn(130, 260, generator=random) * 2.0 ** torch.arange(-65, 65)[:, None]
        y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
        for i, j, part in same_scale(x.numpy(), granularity):
            alone, alone_scale = m3_hw.quantize_fp8(x[part], granularity="tensor")
            assert alone_scale.item() == scale[i, j]
            assert (fp8_bits(alone) == fp8_bits(y[part])).all()

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_error_is_half_a_unit_in_the_last_place(self, granularity: str, random: torch.Generator) -> None:
        x = torch.randn(140, 270, generator=random)
        y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
        values, back = x.double().numpy(), decoded(y)
        for i, j, part in same_scale(values, granularity):
            s = scale[i, j].item()
            allowed = np.maximum(np.abs(values[part]) * 2.0**-4, s * 2.0**-10) * (1 + 1e-6)
            assert (np.abs(back[part] * s - values[part]) <= allowed).all()

    @pytest.mark.parametrize("granularity", GRANULARITIES)
    def test_groups_of_zeros_have_scale_one(self, granularity: str) -> None:
        x = torch.zeros(200, 200)
        y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
        assert scale.eq(1).all()
        assert not fp8_bits(y).any()
        x[130, 150] = -3
        y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
        assert scale.ne(1).sum() == 1
        assert y.float()[130, 150] == -448

    def test_scale_that_underflows_counts_as_zero(self) -> None:
        y, scale = m3_hw.quantize_fp8(torch.full((1, 4), 1e-44), granularity="row")
        assert scale.item() == 1
        assert not fp8_bits(y).any()

    def test_c63_small_values_beside_one_large_one_survive(self) -> None:
        x = torch.full((1, 32), 2.0**-12)
        x[0, 5] = 1
        y, scale = m3_hw.quantize_fp8(x, granularity="group128")
        assert np.allclose(decoded(y) * scale.item(), x.numpy(), rtol=2.0**-4)

    @pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
    def test_a_group_that_is_not_finite_dequantises_to_nan_and_its_neighbours_do_not(self, value: float) -> None:
        x = torch.ones(2, 256)
        x[0, 200] = value
        y, scale = m3_hw.quantize_fp8(x, granularity="group128")
        back = y.float() * scale.repeat_interleave(128, dim=1)
        assert back[0, 200].isnan()
        assert not (back[0, 128:] == 1).any()
        assert torch.allclose(torch.cat([back[0, :128], back[1]]), torch.ones(384))

    @pytest.mark.parametrize(("granularity", "shape"), [("tensor", (1, 1)), ("row", (0, 1)), ("group128", (0, 3)), ("block128", (0, 3))])
    def test_no_rows(self, granularity: str, shape: tuple[int, int]) -> None:
        y, scale = m3_hw.quantize_fp8(torch.zeros(0, 300), granularity=granularity)
        assert y.shape == (0, 300)
        assert y.dtype == FP8
        assert scale.shape == shape
        assert scale.eq(1).all()

    def test_unknown_granularity_names_the_known_ones(self) -> None:
        with pytest.raises(ContractError, match="'column'; accepted: tensor, row, group128, block128"):
            m3_hw.quantize_fp8(torch.zeros(1, 1), granularity="column")


class TestGemmFp8:
    PAIRS = (("row", "row"), ("group128", "block128"), ("tensor", "tensor"))

    @pytest.mark.parametrize("dtype", DTYPES)
    @pytest.mark.parametrize("pair", PAIRS)
    @pytest.mark.parametrize("shape", [(5, 200, 300), (1, 1, 64), (3, 130, 128), (130, 129, 1), (128, 128, 128), (1, 3, 1000), (2, 1, 256)])
    def test_product_of_what_the_values_stand_for(
        self, shape: tuple[int, int, int], pair: tuple[str, str], dtype: torch.dtype, random: torch.Generator
    ) -> None:
        num_rows, num_columns, depth = shape
        quantised = []
        wide = []
        for size, granularity in zip((num_rows, num_columns), pair, strict=True):
            x = torch.randn(size, depth, generator=random) * torch.randn(size, 1, generator=random).exp()
            y, scale = m3_hw.quantize_fp8(x, granularity=granularity)
            values = decoded(y)
            for i, j, part in same_scale(values, granularity):
                values[part] *= scale[i, j].item()
            quantised.append((y, scale))
            wide.append(values)
        (a, a_scale), (b, b_scale) = quantised
        out = m3_hw.gemm_fp8(a, b, a_scale, b_scale, out_dtype=dtype)
        wanted = torch.from_numpy(wide[0] @ wide[1].T)
        assert out.dtype == dtype
        assert (out.double() - wanted).norm() <= max(1e-6, torch.finfo(dtype).eps / 2) * wanted.norm()

    def test_equal_scales_give_the_same_bits_in_every_granularity(self, random: torch.Generator) -> None:
        a, b = (torch.randn(n, 300, generator=random).to(FP8) for n in (6, 140))
        results = [
            m3_hw.gemm_fp8(a, b, torch.full(a_shape, 0.3), torch.full(b_shape, 0.7), out_dtype=torch.float32)
            for a_shape, b_shape in (((6, 1), (140, 1)), ((6, 3), (2, 3)), ((1, 1), (1, 1)))
        ]
        assert torch.equal(results[0], results[1])
        assert torch.equal(results[0], results[2])

    @pytest.mark.parametrize("depth", [1, 64, 128])
    def test_one_group_of_columns_is_the_row_and_the_only_block_is_the_tensor(self, depth: int, random: torch.Generator) -> None:
        """a's rows beside one scale of b: group128 x block128 by shape, and what rows times a tensor would be."""
        a, b = (torch.randn(n, depth, generator=random).to(FP8) for n in (6, 128))
        a_scale, b_scale = torch.rand(6, 1, generator=random) + 0.5, torch.tensor([[0.3]])
        out = m3_hw.gemm_fp8(a, b, a_scale, b_scale, out_dtype=torch.float32)
        rows = m3_hw.gemm_fp8(a, b, a_scale, b_scale.expand(128, 1), out_dtype=torch.float32)
        assert torch.equal(out, rows)

    def test_c12_scales_reach_the_result(self) -> None:
        one = torch.ones(1, 32).to(FP8)
        out = m3_hw.gemm_fp8(one, one, torch.tensor([[0.5]]), torch.tensor([[8.0]]), out_dtype=torch.float32)
        assert out.item() == 32 * 0.5 * 8

    @pytest.mark.parametrize("granularity", ["row", "group128", "tensor"])
    def test_no_rows(self, granularity: str) -> None:
        a, a_scale = m3_hw.quantize_fp8(torch.zeros(0, 256), granularity=granularity)
        b, b_scale = m3_hw.quantize_fp8(torch.ones(7, 256), granularity=dict(self.PAIRS)[granularity])
        assert m3_hw.gemm_fp8(a, b, a_scale, b_scale, out_dtype=torch.bfloat16).shape == (0, 7)

    def test_scales_of_a_pair_that_is_none_name_the_right_shape(self) -> None:
        a, b = torch.ones(4, 300).to(FP8), torch.ones(200, 300).to(FP8)
        with pytest.raises(ContractError, match=r"b_scale has shape \[1, 1\]; accepted: \[200, 1\], beside a_scale \[4, 1\]"):
            m3_hw.gemm_fp8(a, b, torch.ones(4, 1), torch.ones(1, 1), out_dtype=torch.float32)
        with pytest.raises(ContractError, match=r"a_scale has shape \[4, 2\]; accepted: \[4, 1\] or \[4, 3\] or \[1, 1\]"):
            m3_hw.gemm_fp8(a, b, torch.ones(4, 2), torch.ones(2, 3), out_dtype=torch.float32)

    @pytest.mark.parametrize("other", OTHER_FP8)
    def test_c05_operands_of_another_fp8_are_refused(self, other: torch.dtype) -> None:
        a, scale = torch.ones(1, 8), torch.ones(1, 1)
        with pytest.raises(ContractError, match="a has dtype float8"):
            m3_hw.gemm_fp8(a.to(other), a.to(FP8), scale, scale, out_dtype=torch.float32)
        with pytest.raises(ContractError, match="b has dtype float8"):
            m3_hw.gemm_fp8(a.to(FP8), a.to(other), scale, scale, out_dtype=torch.float32)


class TestDequantizeMxfp8:
    def test_every_value_with_every_scale(self) -> None:
        bits = torch.arange(256, dtype=torch.uint8)
        w, scale = bits.repeat(256, 1), bits[:, None].repeat(1, 8)  # a row for each scale
        out = m3_hw.dequantize_mxfp8(w.view(FP8), scale)

        values = w.numpy().view(ml_dtypes.float8_e4m3fn).astype(np.float64)
        powers = bits.numpy().view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[:, None]
        with np.errstate(over="ignore", invalid="ignore"):
            wanted = torch.from_numpy((values * powers).astype(ml_dtypes.bfloat16).view(np.uint16).astype(np.int32))
        by_torch = (w.view(FP8).double() * scale.view(torch.float8_e8m0fnu).double().repeat_interleave(32, dim=1)).bfloat16()

        assert out.dtype == torch.bfloat16
        nan = torch.from_numpy(np.isnan(values * powers))
        assert torch.equal(out.isnan(), nan)
        assert nan.sum() == 256 + 2 * 255
        for other in (wanted, by_torch.view(torch.int16).int() & 0xFFFF):
            assert torch.equal((out.view(torch.int16).int() & 0xFFFF)[~nan], other[~nan])

    def test_scale_255_is_nan_for_zero_too(self) -> None:
        out = m3_hw.dequantize_mxfp8(torch.zeros(1, 64).to(FP8), torch.tensor([[255, 254]], dtype=torch.uint8))
        assert out.isnan().tolist() == [[True] * 32 + [False] * 32]

    def test_scale_127_is_one_and_groups_are_32_wide(self) -> None:
        w = torch.ones(2, 96).to(FP8)
        out = m3_hw.dequantize_mxfp8(w, torch.tensor([[127, 128, 126], [130, 127, 120]], dtype=torch.uint8))
        assert torch.equal(out[:, ::32], torch.tensor([[1, 2, 0.5], [8, 1, 2.0**-7]]).bfloat16())
        assert torch.equal(out[:, 31::32], out[:, ::32])

    def test_c63_block_quantised_with_room_for_448_comes_back_whole(self) -> None:
        """One 1 among values of 2^-12: the exponent ceil(log2(1 / 448)) = -8 keeps them, floor(log2(1)) = 0 would not."""
        x = torch.full((1, 32), 2.0**-12)
        x[0, 9] = 1
        exponent = math.ceil(math.log2(1 / 448))
        scale = torch.tensor([[exponent + 127]], dtype=torch.uint8)
        assert torch.equal(m3_hw.dequantize_mxfp8((x * 2.0**-exponent).to(FP8), scale).float(), x)
        assert not (x.to(FP8).float() == 2.0**-12).any()

    def test_strided_weights(self, random: torch.Generator) -> None:
        w = torch.randn(64, 6, generator=random).to(FP8)
        scale = torch.randint(110, 140, (2, 6), generator=random).to(torch.uint8)
        assert torch.equal(m3_hw.dequantize_mxfp8(w.T, scale.T), m3_hw.dequantize_mxfp8(w.T.contiguous(), scale.T.contiguous()))

    def test_no_rows(self) -> None:
        out = m3_hw.dequantize_mxfp8(torch.zeros(0, 64).to(FP8), torch.zeros(0, 2, dtype=torch.uint8))
        assert out.shape == (0, 64)

    @pytest.mark.parametrize("other", OTHER_FP8)
    def test_c05_weights_of_another_fp8_are_refused(self, other: torch.dtype) -> None:
        with pytest.raises(ContractError, match="w has dtype float8"):
            m3_hw.dequantize_mxfp8(torch.ones(1, 32).to(other), torch.full((1, 1), 127, dtype=torch.uint8))

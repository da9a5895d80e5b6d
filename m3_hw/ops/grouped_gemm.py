"""Matrix product with a weight per expert."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from math import log2

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_prefix_sums, expect_rank, expect_shape, fail
from m3_hw.draw import RANGES, Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, reduction_tolerances, spoil


def grouped_gemm(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    """Multiply the rows of each expert by its weight.

    y[r] = weight[e] rows[r] for offsets[e] <= r < offsets[e + 1]; rows outside all of them give zeros

    Args:
        rows: [M, Kd], floating. Rows from offsets[E] on are not read.
        weight: [E, Nd, Kd], in rows's dtype; every axis at least 1 long.
        offsets: [E+1] int32 prefix sum: first 0, never decreasing, last at most M. Experts without rows are fine anywhere.

    Returns:
        [M, Nd] in rows's dtype, fresh and contiguous.

    Raises:
        ContractError: A shape or dtype differs; offsets is no prefix sum within M.

    Numerics: fp32 accumulation, one rounding, at the end.

    Source: one `torch.nn.functional.linear` per expert, as in transformers `MiniMaxM3VLExperts`.
    """
    acc = accumulate_dtype(rows.dtype)
    out = rows.new_zeros((rows.shape[0], weight.shape[1]))
    for expert, (start, end) in zip(weight, pairwise(offsets.tolist()), strict=True):  # [Nd, Kd]
        if end > start:
            out[start:end] = (rows[start:end].to(acc) @ expert.to(acc).T).to(rows.dtype)
    return out


def _fake(rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
    return rows.new_empty((rows.shape[0], weight.shape[1]))


def _check(rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    expect_rank("rows", rows, "M Kd")
    expect_dtype("rows", rows, FLOATS)
    if weight.dim() != 3 or weight.shape[2] != rows.shape[1] or 0 in weight.shape:
        fail("weight", f"shape {list(weight.shape)}", f"[E, Nd, Kd={rows.shape[1]}] with every axis >= 1")
    expect_dtype("weight", weight, (rows.dtype,))
    expect_shape("offsets", offsets, "E+1", (weight.shape[0] + 1,))
    expect_dtype("offsets", offsets, (torch.int32,))


def _check_values(rows: Tensor, weight: Tensor, offsets: Tensor) -> None:
    expect_prefix_sums("offsets", offsets, rows.shape[0], "M")


def _unowned(call: Call) -> dict[str, Tensor]:
    rows, offsets = call["rows"], call["offsets"]
    index = torch.arange(rows.shape[0], device=rows.device)
    return {"rows": (index >= offsets[-1])[:, None].expand_as(rows)}


def draw_weight(draw: Draw, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """Weights that keep the size of what they multiply, in every value range: no product leaves fp16."""
    power = round(log2(4 / shape[-1]) / 2)
    return draw.values(shape, dtype, scale=2.0**power / RANGES[draw.value_range][1])


def _sample(sizes: Sequence[int], out_width: int, width: int, *, spare: int = 0) -> Callable[[Draw, torch.dtype], Call]:
    """`sizes` are the rows of each expert, `spare` the rows behind them that no expert owns."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        return {
            "rows": draw.values((sum(sizes) + spare, width), dtype),
            "weight": draw_weight(draw, (len(sizes), out_width, width), dtype),
            "offsets": torch.tensor([0, *sizes]).cumsum(0).int(),
        }

    return make


def _uneven(num_rows: int, num_experts: int) -> list[int]:
    """Sizes that fall off as 1 / (1 + e), the first expert without rows: what real routing looks like."""
    share = 1.0 / torch.arange(1, num_experts, dtype=torch.float64)
    sizes: list[int] = (num_rows * share / share.sum()).long().tolist()
    return [0, *sizes]


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    sizes = [draw.choice((0, 0, 1, 2, draw.integer(0, 40))) for _ in range(draw.integer(1, 20))]
    return _sample(sizes, draw.integer(16, 100), draw.integer(1, 130), spare=draw.integer(0, 4))(draw, dtype)


SPEC = OpSpec(
    reference=grouped_gemm,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("y",),
    tolerances={"y": reduction_tolerances()},
    unowned=_unowned,
    samples=(
        Sample(name="rows", make=_sample((3, 0, 5, 2), 32, 48, spare=2)),
        Sample(name="empty", make=_sample((0, 0, 0), 32, 48)),
        Sample(name="one_row", make=_sample((0, 1, 0), 17, 9)),
        Sample(name="odd", make=_sample((7, 1, 13), 33, 65)),
        Sample(name="nobody_owns", make=_sample((0, 0), 16, 16, spare=4)),
        Sample(name="first_expert_only", make=_sample((9, 0, 0, 0), 24, 40)),
        Sample(name="last_expert_only", make=_sample((0, 0, 0, 9), 24, 40, spare=3)),
        Sample(name="tile_edges", make=_sample((8, 16, 32, 63, 64, 65), 32, 32)),
        Sample(name="m3_gate_up", tier="model", make=_sample((1, 0, 33), 6144, 6144, spare=5), note="3 of M3's 128 experts"),
        Sample(name="m3_down", tier="model", make=_sample((16, 7, 0, 1), 6144, 3072), note="4 of M3's 128 experts"),
        Sample(name="m3_experts", tier="model", make=_sample(_uneven(1024, 128), 384, 384), note="all 128 experts at 1/16 of the widths"),
        Sample(name="many_rows", tier="stress", make=_sample(_uneven(16385, 128), 193, 257, spare=7)),
        Sample(name="deep", tier="stress", make=_sample((5, 0, 3), 33, 32771)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="rows of rank 1", argument="rows", change=spoil(rows=lambda r: r[0])),
        ErrorSample(name="integer rows", argument="rows", change=spoil(rows=lambda r: r.int())),
        ErrorSample(name="weight of one expert", argument="weight", change=spoil(weight=lambda w: w[0])),
        ErrorSample(name="weight not transposed", argument="weight", change=spoil(weight=lambda w: w.mT)),
        ErrorSample(name="weight without experts", argument="weight", change=spoil(weight=lambda w: w[:0], offsets=lambda o: o[:1])),
        ErrorSample(name="weight in float64", argument="weight", change=spoil(weight=lambda w: w.double())),
        ErrorSample(name="offsets without the end", argument="offsets", change=spoil(offsets=lambda o: o[:-1])),
        ErrorSample(name="offsets of rank 2", argument="offsets", change=spoil(offsets=lambda o: o[None])),
        ErrorSample(name="offsets in int64", argument="offsets", change=spoil(offsets=lambda o: o.long())),
        ErrorSample(name="offsets from 1", argument="offsets", reads_values=True, change=spoil(offsets=lambda o: o.clamp(min=1))),
        ErrorSample(name="offsets negative", argument="offsets", reads_values=True, change=spoil(offsets=lambda o: o - 1)),
        ErrorSample(name="offsets decreasing", argument="offsets", reads_values=True, change=spoil(offsets=lambda o: o[[0, 3, 2, 3, 4]])),
        ErrorSample(name="offsets past the rows", argument="offsets", reads_values=True, change=spoil(rows=lambda r: r[:9])),
    ),
)

"""Experts' outputs back in the order of their tokens, weighed and summed."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_dtype, expect_rank, expect_shape, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, accumulate_dtype, elementwise_tolerances, spoil


def unpermute_tokens(rows: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    """Sum each token's rows with its weights: undoes `permute_tokens`.

    y[t] = sum over a = 0 .. A-1 of weights[t, a] * rows[r] where source[r] = t*A + a

    Slots that no row names add nothing: their experts live on other ranks. The routed scale is already inside the weights.

    Args:
        rows: [T*A, H], floating. Rows with source -1 are not read.
        source: [T*A] int32, the flat index t*A + a of each row, each at most once; -1 skips the row.
        weights: [T, A] float32 (float64 with float64 rows).

    Returns:
        [T, H] in rows's dtype, fresh and contiguous.

    Raises:
        ContractError: A shape or dtype differs; source holds a value outside -1 to T*A - 1, or one twice.

    Numerics: Products and sum in fp32, in the order of the slots whatever the order of the rows; one rounding, at the end.

    Source: the weighted sum of transformers `MiniMaxM3VLExperts`.
    """
    acc = accumulate_dtype(rows.dtype)
    out = torch.zeros((weights.shape[0], rows.shape[1]), dtype=acc, device=rows.device)
    row_of = row_of_slot(source).view(weights.shape)  # [T, A]
    for a in range(weights.shape[1]):
        term = weights[:, a, None].to(acc) * rows[row_of[:, a]].to(acc)  # [T, H]; any row where there is none
        out += torch.where(row_of[:, a, None] >= 0, term, 0)
    return out.to(rows.dtype)


def row_of_slot(source: Tensor) -> Tensor:
    """Inverse of source [T*A] int64: the row of each flat index, -1 where there is none."""
    num_rows = source.shape[0]
    target = torch.where(source < 0, num_rows, source).long()  # skipped rows land behind the end
    row_of = torch.full((num_rows + 1,), -1, dtype=torch.int64, device=source.device)
    return row_of.scatter_(0, target, torch.arange(num_rows, device=source.device))[:num_rows]


def _fake(rows: Tensor, source: Tensor, weights: Tensor) -> Tensor:
    return rows.new_empty((weights.shape[0], rows.shape[1]))


def check_weights(weights: Tensor, data_dtype: torch.dtype) -> None:
    """What operators on routed tokens share: weights in float32, float64 with float64 data."""
    expect_dtype("weights", weights, (accumulate_dtype(data_dtype),))


def _check(rows: Tensor, source: Tensor, weights: Tensor) -> None:
    expect_rank("rows", rows, "T*A H")
    expect_dtype("rows", rows, FLOATS)
    expect_shape("source", source, "T*A", rows.shape[:1])
    expect_dtype("source", source, (torch.int32,))
    if weights.dim() != 2 or weights.numel() != rows.shape[0] or weights.shape[1] == 0:
        fail("weights", f"shape {list(weights.shape)}", f"[T, A] with A >= 1 and T*A={rows.shape[0]}")
    check_weights(weights, rows.dtype)


def _check_values(rows: Tensor, source: Tensor, weights: Tensor) -> None:
    num_rows = source.shape[0]
    if num_rows == 0:
        return
    counts = torch.bincount(source.clamp(-1, num_rows) + 1, minlength=num_rows + 2)  # by value, -1 to M
    outside = (source < -1) | (source >= num_rows)
    if bool(outside.any()):
        r = int(outside.nonzero()[0])
        fail("source", f"value {int(source[r])} at row {r}", f"-1 to {num_rows - 1}")
    if bool((counts[1:] > 1).any()):
        value = int((counts[1:] > 1).nonzero()[0])
        fail("source", f"value {value} in {int(counts[value + 1])} rows", "each value once at most")


def _unowned(call: Call) -> dict[str, Tensor]:
    rows, source, weights = call["rows"], call["source"], call["weights"]
    return {
        "rows": (source < 0)[:, None].expand_as(rows),
        "weights": (row_of_slot(source) < 0).view(weights.shape),
    }


def draw_weights(draw: Draw, num_tokens: int, top_k: int, dtype: torch.dtype) -> Tensor:
    """Weights [T, A] of a router with scale 2: multiples of 1/128, the last one of a row the largest."""
    cuts = torch.sort(draw.integers(1, 128, (num_tokens, top_k)), dim=-1).values
    return (cuts / 64).to(accumulate_dtype(dtype))


def _sample(num_tokens: int, hidden: int, top_k: int, *, dropped: int = 0) -> Callable[[Draw, torch.dtype], Call]:
    """One of `dropped` rows has source -1, anywhere among the others; 0: none."""

    def make(draw: Draw, dtype: torch.dtype) -> Call:
        num_rows = num_tokens * top_k
        source = draw.permutation(num_rows).int()
        if dropped:
            source[draw.integers(0, dropped, (num_rows,)) == 0] = -1
        weights = draw_weights(draw, num_tokens, top_k, dtype)
        return {"rows": draw.values((num_rows, hidden), dtype), "source": source, "weights": weights}

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    # 16 channels at least: the row's size is what cancellation in one channel is measured against.
    return _sample(draw.integer(0, 60), draw.integer(16, 200), draw.integer(1, 9), dropped=draw.choice((0, 1, 2, 8)))(draw, dtype)


SPEC = OpSpec(
    reference=unpermute_tokens,
    fake=_fake,
    check=_check,
    check_values=_check_values,
    outputs=("y",),
    tolerances={"y": elementwise_tolerances()},
    unowned=_unowned,
    samples=(
        Sample(name="rows", make=_sample(6, 24, 3)),
        Sample(name="empty", make=_sample(0, 24, 3)),
        Sample(name="one_token", make=_sample(1, 17, 1)),
        Sample(name="odd", make=_sample(13, 33, 5)),
        Sample(name="dropped", make=_sample(9, 16, 4, dropped=2)),
        Sample(name="all_dropped", make=_sample(4, 16, 2, dropped=1)),
        Sample(name="many_tokens", make=_sample(130, 16, 2, dropped=2)),
        Sample(name="m3", tier="model", make=_sample(1024, 6144, 4)),
        Sample(name="m3_rank", tier="model", make=_sample(1024, 6144, 4, dropped=2), note="half of the slots on other ranks"),
        Sample(name="long", tier="stress", make=_sample(16385, 129, 8, dropped=8)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="rows of rank 3", argument="rows", change=spoil(rows=lambda r: r[None])),
        ErrorSample(name="integer rows", argument="rows", change=spoil(rows=lambda r: r.int())),
        ErrorSample(name="source too short", argument="source", change=spoil(source=lambda s: s[1:])),
        ErrorSample(name="source of rank 2", argument="source", change=spoil(source=lambda s: s.view(6, 3))),
        ErrorSample(name="source in int64", argument="source", change=spoil(source=lambda s: s.long())),
        ErrorSample(name="weights of rank 1", argument="weights", change=spoil(weights=lambda w: w.flatten())),
        ErrorSample(name="weights of other tokens", argument="weights", change=spoil(weights=lambda w: w[1:])),
        ErrorSample(name="weights in bfloat16", argument="weights", change=spoil(weights=lambda w: w.bfloat16())),
        ErrorSample(name="source twice", argument="source", reads_values=True, change=spoil(source=lambda s: s.clamp(max=16))),
        ErrorSample(name="source past the slots", argument="source", reads_values=True, change=spoil(source=lambda s: s + 1)),
        ErrorSample(name="source below -1", argument="source", reads_values=True, change=spoil(source=lambda s: s - 2)),
    ),
)

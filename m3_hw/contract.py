"""What the operators' contract checks share. Every failure names the argument, what it has and what is accepted."""

from collections.abc import Sequence
from itertools import pairwise
from typing import NoReturn

import torch
from torch import Tensor

from m3_hw.errors import ContractError

FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
FP8 = torch.float8_e4m3fn
PAGE_SIZE = 128
"""Keys in a page, which is exactly one MSA block."""


def fail(argument: str, has: object, accepted: object) -> NoReturn:
    raise ContractError(f"{argument} has {has}; accepted: {accepted}")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def expect_dtype(argument: str, tensor: Tensor, accepted: Sequence[torch.dtype]) -> None:
    if tensor.dtype not in accepted:
        fail(argument, f"dtype {_name(tensor.dtype)}", ", ".join(map(_name, accepted)))


def expect_rank(argument: str, tensor: Tensor, axes: str) -> None:
    """`axes` names the axes, as in "T Hq D"."""
    if tensor.dim() != axes.count(" ") + 1:
        fail(argument, f"rank {tensor.dim()} (shape {list(tensor.shape)})", f"[{axes.replace(' ', ', ')}]")


def expect_shape(argument: str, tensor: Tensor, axes: str, shape: Sequence[int]) -> None:
    """`axes` names what `shape` counts, as in "Hkv T K"; -1 in `shape` accepts any size."""
    if tensor.shape == shape:
        return  # the hot path
    if tensor.dim() != len(shape) or any(want not in (-1, got) for want, got in zip(shape, tensor.shape, strict=True)):
        wanted = ", ".join(f"{axis}" if size < 0 else f"{axis}={size}" for axis, size in zip(axes.split(), shape, strict=True))
        fail(argument, f"shape {list(tensor.shape)}", f"[{wanted}]")


def expect_at_least(argument: str, value: int, least: int) -> None:
    if value < least:
        fail(argument, f"value {value}", f"an integer >= {least}")


_SMALLEST, _LARGEST = torch.finfo(torch.float32).tiny, torch.finfo(torch.float32).max


def expect_positive(argument: str, value: float) -> None:
    """A number above zero that fp32 holds, as kernels do: scales, eps, limits."""
    if not _SMALLEST <= value <= _LARGEST:
        fail(argument, f"value {value}", f"a finite number > 0, {_SMALLEST:.4g} to {_LARGEST:.4g}")


def expect_finite(argument: str, value: float) -> None:
    if not abs(value) <= _LARGEST:
        fail(argument, f"value {value}", f"a finite number, at most {_LARGEST:.4g} in magnitude")


def expect_sizes(argument: str, tensor: Tensor, axes: str, *positive: int) -> None:
    """The named axes hold at least one element: heads, channels, choices."""
    for axis in positive:
        if tensor.shape[axis] == 0:
            fail(argument, f"shape {list(tensor.shape)}", f"[{axes.replace(' ', ', ')}] with {axes.split()[axis]} >= 1")


def expect_prefix_sums(argument: str, offsets: Tensor, last: int, what: str) -> list[int]:
    """Values of a prefix sum: starts at 0, never decreases, ends within `last`. Reads the tensor."""
    values: list[int] = offsets.tolist()
    if values[0] != 0:
        fail(argument, f"first value {values[0]}", "0")
    for i, (a, b) in enumerate(pairwise(values)):
        if b < a:
            fail(argument, f"value {b} after {a} at index {i + 1}", "non-decreasing values")
    if values[-1] > last:
        fail(argument, f"last value {values[-1]}", f"at most {what} = {last}")
    return values


def expect_sequences(cu_seqlens_q: Tensor, seq_lens: Tensor, block_table: Tensor) -> None:
    """Shapes and dtypes of a packed, paged batch: cu_seqlens_q [B+1], seq_lens [B], block_table [B, M], all int32."""
    expect_rank("seq_lens", seq_lens, "B")
    num_seqs = seq_lens.shape[0]
    expect_shape("cu_seqlens_q", cu_seqlens_q, "B+1", (num_seqs + 1,))
    expect_shape("block_table", block_table, "B M", (num_seqs, -1))
    for argument, tensor in (("cu_seqlens_q", cu_seqlens_q), ("seq_lens", seq_lens), ("block_table", block_table)):
        expect_dtype(argument, tensor, (torch.int32,))


def expect_sequence_values(
    cu_seqlens_q: Tensor,
    seq_lens: Tensor,
    block_table: Tensor,
    *,
    num_tokens: int,
    num_pages: int,
    max_seqlen_q: int,
    max_seqlen_k: int | None = None,
) -> None:
    """Values of a packed, paged batch. Reads the tensors, so it runs on the CPU, elsewhere under M3_HW_CHECK=1."""
    starts = expect_prefix_sums("cu_seqlens_q", cu_seqlens_q, num_tokens, "T")
    capacity = block_table.shape[1] * PAGE_SIZE
    lengths: list[int] = seq_lens.tolist()
    for b, length in enumerate(lengths):
        num_queries = starts[b + 1] - starts[b]
        if length < num_queries:
            fail("seq_lens", f"value {length} at index {b}", f"at least the sequence's {num_queries} queries")
        if length > capacity:
            fail("seq_lens", f"value {length} at index {b}", f"at most {capacity}, what block_table's columns hold")
        if num_queries > max_seqlen_q:
            fail("max_seqlen_q", f"value {max_seqlen_q}", f"at least {num_queries}, the queries of sequence {b}")
        if max_seqlen_k is not None and length > max_seqlen_k:
            fail("max_seqlen_k", f"value {max_seqlen_k}", f"at least {length}, the keys of sequence {b}")
    if not lengths or block_table.shape[1] == 0:
        return
    columns = torch.arange(block_table.shape[1], device=block_table.device)
    used = columns < ((seq_lens + PAGE_SIZE - 1) // PAGE_SIZE)[:, None]  # [B, M]
    bad = used & ((block_table < 0) | (block_table >= num_pages))
    if bool(bad.any()):
        b, m = (int(i) for i in bad.nonzero()[0])
        fail("block_table", f"page {int(block_table[b, m])} at [{b}, {m}]", f"0 to {num_pages - 1}, the pages of the pool")


def expect_cache(argument: str, cache: Tensor, axes: str, shape: Sequence[int], data_dtype: torch.dtype) -> None:
    """A paged cache: the data's dtype or fp8 e4m3fn, pages of exactly one MSA block."""
    expect_shape(argument, cache, axes, shape)
    expect_dtype(argument, cache, (data_dtype, FP8))

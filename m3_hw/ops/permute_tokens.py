"""Tokens in the order of their experts."""

from collections.abc import Callable

import torch
from torch import Tensor

from m3_hw.contract import FLOATS, expect_at_least, expect_dtype, expect_rank, fail
from m3_hw.draw import Draw
from m3_hw.spec import Call, ErrorSample, OpSpec, Sample, exact_tolerances, spoil


def permute_tokens(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    """Copy each token once per chosen expert, sorted by expert.

    rows[r] = x[source[r] // A]; the rows of expert e are offsets[e] to offsets[e + 1] - 1

    The sort is stable: an expert's rows keep the order of (token, slot). Ids outside 0 to num_experts - 1 are dropped: they
    are experts of other ranks.

    Args:
        x: [T, H], floating.
        ids: [T, A] int32, any values, repeats included.
        num_experts: Experts E that rows are made for.

    Returns:
        (rows [T*A, H] in x's dtype, source [T*A] int32, offsets [E+1] int32), fresh and contiguous. source is the flat index
        t*A + a of a row. Rows from offsets[E] on, one per dropped id, are zeros with source -1.

    Raises:
        ContractError: A shape or dtype differs; num_experts is below 1; T*A passes int32.

    Numerics: Copies, bit for bit.

    Source: the same data movement as vLLM's `moe_permute`.
    """
    experts = torch.where((ids >= 0) & (ids < num_experts), ids, num_experts).flatten()  # [T*A], dropped ids last
    ordered, source = torch.sort(experts, stable=True)
    offsets = torch.searchsorted(ordered, torch.arange(num_experts + 1, device=ids.device, dtype=ids.dtype), out_int32=True)
    dropped = ordered == num_experts
    rows = x[source // ids.shape[1]].masked_fill(dropped[:, None], 0)  # [T*A, H]
    return rows, source.masked_fill(dropped, -1).int(), offsets


def _fake(x: Tensor, ids: Tensor, num_experts: int) -> tuple[Tensor, Tensor, Tensor]:
    num_rows = ids.shape[0] * ids.shape[1]
    return x.new_empty((num_rows, x.shape[1])), ids.new_empty((num_rows,)), ids.new_empty((num_experts + 1,))


def check_tokens(x: Tensor, ids: Tensor) -> None:
    """What operators on routed tokens share: x [T, H] floating, ids [T, A] int32."""
    expect_rank("x", x, "T H")
    expect_dtype("x", x, FLOATS)
    if ids.dim() != 2 or ids.shape[0] != x.shape[0] or ids.shape[1] == 0:
        fail("ids", f"shape {list(ids.shape)}", f"[T={x.shape[0]}, A] with A >= 1")
    expect_dtype("ids", ids, (torch.int32,))
    if ids.numel() >= 2**31:
        fail("ids", f"{ids.numel()} values", "less than 2^31")


def _check(x: Tensor, ids: Tensor, num_experts: int) -> None:
    check_tokens(x, ids)
    expect_at_least("num_experts", num_experts, 1)


def unowned_tokens(ids: Tensor, num_experts: int, x: Tensor) -> Tensor:
    """Mask [T, H] of the tokens that no expert here takes: nothing of x is read there."""
    return ((ids < 0) | (ids >= num_experts)).all(-1, keepdim=True).expand_as(x)


def _unowned(call: Call) -> dict[str, Tensor]:
    return {"x": unowned_tokens(call["ids"], call["num_experts"], call["x"])}


Ids = Callable[[Draw, int, int, int], Tensor]
"""Makes ids [T, A] from T, A and E."""


def distinct_ids(draw: Draw, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """What a router gives: no expert twice in a row."""
    return torch.argsort(draw.integers(0, 2**31, (num_tokens, num_experts)), dim=-1, stable=True)[:, :top_k].int()


def stray_ids(draw: Draw, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
    """Half of the ids outside 0 to E-1, with -1, E and repeats; the first token has nothing else."""
    ids = draw.integers(-max(num_experts // 2, 1), num_experts + max(num_experts // 2, 1), (num_tokens, top_k)).int()
    edges = torch.tensor([-1, num_experts], dtype=torch.int32).repeat(top_k)[:top_k]
    return torch.cat((edges[None], ids[1:])) if num_tokens else ids


def ids_among(*experts: int) -> Ids:
    """Only these experts get rows."""

    def make(draw: Draw, num_tokens: int, top_k: int, num_experts: int) -> Tensor:
        return torch.tensor(experts, dtype=torch.int32)[draw.integers(0, len(experts), (num_tokens, top_k))]

    return make


def _sample(
    num_tokens: int, hidden: int, top_k: int, num_experts: int, make_ids: Ids = distinct_ids
) -> Callable[[Draw, torch.dtype], Call]:
    def make(draw: Draw, dtype: torch.dtype) -> Call:
        ids = make_ids(draw, num_tokens, top_k, num_experts)
        return {"x": draw.values((num_tokens, hidden), dtype), "ids": ids, "num_experts": num_experts}

    return make


def _random_sample(draw: Draw, dtype: torch.dtype) -> Call:
    num_experts = draw.integer(1, 161)
    top_k = draw.integer(1, min(num_experts, 8) + 1)
    return _sample(draw.integer(0, 60), draw.integer(1, 200), top_k, num_experts, draw.choice((distinct_ids, stray_ids)))(draw, dtype)


_EXACT = exact_tolerances("copies and indices")

SPEC = OpSpec(
    reference=permute_tokens,
    fake=_fake,
    check=_check,
    outputs=("rows", "source", "offsets"),
    tolerances={"rows": _EXACT, "source": _EXACT, "offsets": _EXACT},
    unowned=_unowned,
    samples=(
        Sample(name="rows", make=_sample(6, 24, 3, 8)),
        Sample(name="empty", make=_sample(0, 24, 3, 8)),
        Sample(name="one_token", make=_sample(1, 7, 2, 3)),
        Sample(name="odd", make=_sample(13, 33, 5, 11)),
        Sample(name="stray_ids", make=_sample(9, 16, 4, 6, stray_ids)),
        Sample(name="all_dropped", make=_sample(5, 16, 2, 4, ids_among(-1, 4, 1 << 30))),
        Sample(name="inner_experts", make=_sample(8, 16, 2, 8, ids_among(2, 3, 6))),
        Sample(name="last_expert", make=_sample(8, 16, 2, 8, ids_among(7))),
        Sample(name="m3", tier="model", make=_sample(1024, 6144, 4, 128)),
        Sample(name="m3_rank", tier="model", make=_sample(1024, 6144, 4, 16, stray_ids), note="16 of the 128 experts: one rank of 8"),
        Sample(name="long", tier="stress", make=_sample(32769, 65, 8, 257)),
    ),
    random_sample=_random_sample,
    error_samples=(
        ErrorSample(name="x of rank 3", argument="x", change=spoil(x=lambda x: x[None])),
        ErrorSample(name="integer x", argument="x", change=spoil(x=lambda x: x.int())),
        ErrorSample(name="ids of rank 1", argument="ids", change=spoil(ids=lambda i: i[:, 0])),
        ErrorSample(name="ids of other tokens", argument="ids", change=spoil(ids=lambda i: i[1:])),
        ErrorSample(name="ids without slots", argument="ids", change=spoil(ids=lambda i: i[:, :0])),
        ErrorSample(name="ids in int64", argument="ids", change=spoil(ids=lambda i: i.long())),
        ErrorSample(name="num_experts zero", argument="num_experts", change=spoil(num_experts=0)),
        ErrorSample(name="num_experts negative", argument="num_experts", change=spoil(num_experts=-8)),
    ),
)

"""An operator's spec: its reference and what hangs on it. Nothing is declared twice."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, ParamSpec, TypeVar

import torch
from torch import Tensor

from m3_hw.contract import FLOATS
from m3_hw.draw import Draw

P = ParamSpec("P")
R = TypeVar("R")

Call = dict[str, Any]
"""One call of an operator: every argument by name, in the order of the signature."""

Tier = Literal["small", "model", "stress"]
Rule = Literal["exact", "ulp", "rel_l2", "selection"]


@dataclass(frozen=True, kw_only=True)
class Tolerance:
    """The one rule that judges an output, its limits, and why they are what they are.

    exact: same bits (+0 equals -0, NaN equals NaN).
    ulp: every element within `limit` units in the last place of the output's dtype; differences under `floor`
        times the row's largest magnitude don't count (cancellation in fp32).
    rel_l2: ||a - g|| / ||g|| <= `limit` overall and <= `worst_row` in every row (last axis). Where the root mean square
        of g is below `unit`, that stands in its place: a logarithm near 0 is not known to its own digits.
    selection: sets of ids per row; rows that differ only by scores within `margin` (of the row's largest) of the
        K-th are near ties. Inside a row, ids ascend or scores descend, as `order` says.
    """

    rule: Rule
    reason: str
    limit: float = 0.0
    worst_row: float = 0.0
    floor: float = 0.0
    unit: float = 0.0
    margin: float = 0.0
    order: Literal["id", "score"] = "id"


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Inputs of a parity case: `make(draw, dtype)` builds the call on the CPU."""

    name: str
    make: Callable[[Draw, torch.dtype], Call]
    tier: Tier = "small"
    dtypes: tuple[torch.dtype, ...] | None = None  # None: all of the operator's
    note: str = ""  # what a report must say of it, such as "scaled to 1/8 of its length"


@dataclass(frozen=True, kw_only=True)
class ErrorSample:
    """A malformed call: `change` spoils the first sample's call; the ContractError must name `argument`."""

    name: str
    argument: str
    change: Callable[[Call], Call]
    reads_values: bool = False  # found by reading a tensor: on the CPU always, elsewhere under M3_HW_CHECK=1


def no_values(*_: Any, **__: Any) -> None:
    """`check_values` of an operator whose contract needs no look at the values."""


@dataclass(frozen=True, kw_only=True)
class OpSpec(Generic[P, R]):
    """Everything that the package knows of an operator.

    reference: the operator itself, in plain PyTorch; computes in fp64 on fp64 input, else in fp32. Its name,
        signature and docstring are the operator's.
    fake: the same signature; shapes and dtypes of the outputs, fresh and contiguous.
    check: the same signature; raises ContractError by shapes, dtypes and scalars alone.
    check_values: likewise, by reading the tensors.
    outputs: names of what the operator returns, or of the arguments that it writes, in `mutates`.
    tolerances: by output, then by the dtype of the data. `golden` makes what they are measured against: by
        default the reference on the same inputs upcast to fp64.
    samples: for every check; the first is also what error samples spoil. `random_sample` draws one more of any
        shape for the certify tier.
    token_axes: the axis that counts tokens, by argument and by output, for operators whose tokens can be cut
        apart anywhere; `sequence_axes` for those that only sequences cut (cu_seqlens without a cache).
    pools: the paged caches behind each block table, for permuting pages.
    unowned: masks, by argument, of what nobody owns and may hold anything, NaN included.
    scores: for selections, the fp64 score of every candidate id, for counting near ties; -inf is not a candidate,
        +inf is forced.
    """

    reference: Callable[P, R]
    fake: Callable[P, Any]
    check: Callable[..., None]
    outputs: tuple[str, ...]
    tolerances: Mapping[str, Mapping[torch.dtype, Tolerance]]
    samples: Sequence[Sample]
    random_sample: Callable[[Draw, torch.dtype], Call]
    error_samples: Sequence[ErrorSample]
    check_values: Callable[..., None] = no_values
    dtypes: tuple[torch.dtype, ...] = FLOATS[:3]
    mutates: tuple[str, ...] = ()
    golden: Callable[..., Any] | None = None
    token_axes: Mapping[str, int] = field(default_factory=dict)
    sequence_axes: Mapping[str, int] = field(default_factory=dict)
    pools: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    unowned: Callable[[Call], dict[str, Tensor]] | None = None
    scores: Callable[[Call], Tensor] | None = None

    @property
    def name(self) -> str:
        """Operator's name: of the file, the function, the torch op and the test ids."""
        return self.reference.__name__


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """What a reference computes in: fp64 on fp64 input, else fp32."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def upcast(call: Call) -> Call:
    """The call with every floating tensor in fp64, exactly: what the golden result is computed from."""
    return {k: v.double() if isinstance(v, Tensor) and v.is_floating_point() else v for k, v in call.items()}


def spoil(**changes: Any) -> Callable[[Call], Call]:
    """A `change` for error samples: replaces arguments, by a value or by a function of the old value."""
    return lambda call: {k: (changes[k](v) if callable(changes[k]) else changes[k]) if k in changes else v for k, v in call.items()}


def elementwise_tolerances(*, ulps: int = 1) -> dict[torch.dtype, Tolerance]:
    """Limits of an operator that computes in fp32 and rounds once."""
    rounded = Tolerance(
        rule="ulp",
        limit=ulps,
        floor=2.0**-20,
        reason="fp32 arithmetic, one rounding: the neighbour at most; fp32 cancellation noise is 2^-20 of the row",
    )
    exact = Tolerance(rule="rel_l2", limit=1e-6, worst_row=1e-5, reason="fp32 arithmetic on a handful of operations an element")
    return {torch.float32: exact, torch.bfloat16: rounded, torch.float16: rounded}


def reduction_tolerances() -> dict[torch.dtype, Tolerance]:
    """Limits of matrix products and attention with fp32 accumulation."""
    reason = "fp32 accumulation, probabilities or products rounded to the input's dtype once, one rounding at the end"
    low = Tolerance(rule="rel_l2", limit=4e-3, worst_row=1e-2, reason=reason)
    return {
        torch.float32: Tolerance(rule="rel_l2", limit=1e-5, worst_row=1e-4, reason="fp32 accumulation in any order"),
        torch.bfloat16: low,
        torch.float16: low,
    }


def exact_tolerances(reason: str) -> dict[torch.dtype, Tolerance]:
    return dict.fromkeys((*FLOATS, torch.float8_e4m3fn), Tolerance(rule="exact", reason=reason))

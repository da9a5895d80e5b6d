"""Cases: which there are, their inputs, and how one runs on a backend."""

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from m3_hw.contract import FLOATS
from m3_hw.dispatch import backends as known_backends
from m3_hw.dispatch import simulating, specs, use_backend
from m3_hw.draw import RANGES, Draw
from m3_hw.errors import ContractError
from m3_hw.parity.judge import Outputs
from m3_hw.parity.results import Case
from m3_hw.spec import Call, OpSpec, Sample, upcast

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in FLOATS[:3]}
TIERS = ("small", "model", "stress")
RANDOM = "random_"
"""Prefix of samples that a certify run draws: `random_17` is the operator's 17th."""


def find_cases(
    *,
    ops: Sequence[str] | None = None,
    backends: Sequence[str] | None = None,
    dtypes: Sequence[str] | None = None,
    tiers: Sequence[str] = ("small",),
    samples: Sequence[str] | None = None,
) -> list[Case]:
    """Every case of the named operators, backends, dtypes, tiers and samples (None: all), sorted.

    Raises:
        ContractError: An unknown name; lists the known ones.
    """
    known_ops = specs()
    ops = accepted("op", ops, known_ops)
    names = accepted("sample", samples, {sample.name for op in ops for sample in known_ops[op].samples}) if samples else None
    accepted("tier", tiers, TIERS)
    return sorted(
        Case(op, backend, dtype, sample.name, sample.tier)
        for op in ops
        for backend in accepted("backend", backends, known(), default=list(known_backends()))
        for dtype in accepted("dtype", dtypes, DTYPES)
        for sample in known_ops[op].samples
        if sample.tier in tiers and (names is None or sample.name in names) and DTYPES[dtype] in _dtypes(known_ops[op], sample)
    )


def known() -> list[str]:
    """Names of every backend that cases can run on, `reference` last."""
    return [*known_backends(), "reference"]


def accepted(what: str, names: Sequence[str] | None, options: Iterable[str], *, default: Sequence[str] | None = None) -> list[str]:
    """The names, all of them known; None gives the default, else every option."""
    options = list(options)
    if names is None:
        return list(default) if default is not None else options
    for name in names:
        if name not in options:
            raise ContractError(f"{what} has {name!r}; accepted: {', '.join(sorted(options))}")
    return list(names)


def _dtypes(spec: OpSpec[..., Any], sample: Sample) -> tuple[torch.dtype, ...]:
    return spec.dtypes if sample.dtypes is None else sample.dtypes


def find_sample(case: Case) -> Sample:
    """The sample that a case names.

    Raises:
        ContractError: The operator or the sample is unknown, as when a recording comes from another version.
    """
    spec = specs()[accepted("op", [case.op], specs())[0]]
    if case.sample.startswith(RANDOM):
        return Sample(name=case.sample, make=spec.random_sample)
    for sample in spec.samples:
        if sample.name == case.sample:
            return sample
    raise ContractError(f"sample has {case.sample!r}; accepted for {case.op}: {', '.join(s.name for s in spec.samples)}")


def make_draw(case: Case, seed: int = 0) -> Draw:
    """The case's source of data: the same for every backend. Random cases also draw their range of values."""
    draw = Draw((seed << 32) + zlib.crc32(f"{case.op}-{case.dtype}-{case.sample}".encode()))
    if case.sample.startswith(RANDOM):
        draw.value_range = draw.choice(tuple(RANGES))
    return draw


def make_call(case: Case, seed: int = 0) -> Call:
    """The case's inputs on the CPU: the same bits on every machine."""
    return find_sample(case).make(make_draw(case, seed), DTYPES[case.dtype])


def clone(call: Call) -> Call:
    """A copy whose tensors share nothing with the call's and have its strides."""
    return {name: _copy(value, value.device) if isinstance(value, Tensor) else value for name, value in call.items()}


def to_device(call: Call, device: torch.device | str) -> Call:
    """The call with its tensors on a device, strides as they are."""
    target = torch.device(device)
    return {
        name: _copy(value, target) if isinstance(value, Tensor) and value.device.type != target.type else value
        for name, value in call.items()
    }


def _copy(x: Tensor, device: torch.device) -> Tensor:
    """With x's strides, gaps included, which `clone` and `to` would close; of an expanded view without them."""
    if any(size > 1 and stride == 0 for size, stride in zip(x.shape, x.stride(), strict=True)):
        return x.to(device, copy=True)
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device).copy_(x)


def named_outputs(spec: OpSpec[..., Any], returned: Any, call: Call) -> Outputs:
    """What came back, or was written into the call's tensors, by output name."""
    if spec.mutates:
        return {name: call[name] for name in spec.outputs if call[name] is not None}
    tensors = returned if isinstance(returned, tuple) else (returned,)
    return dict(zip(spec.outputs, tensors, strict=True))


def run_op(spec: OpSpec[..., Any], backend: str, call: Call) -> Outputs:
    """Run the operator on a backend, on the call's own tensors."""
    with use_backend(backend):
        returned = getattr(torch.ops.m3_hw, spec.name).default(**call)
    return named_outputs(spec, returned, call)


def device_of(backend: str) -> str:
    """The device type that a backend's cases run on in this process."""
    if backend == "reference":
        return "cpu"
    return known_backends()[backend].device_type_when(simulate=simulating())


def run_case(case: Case, call: Call) -> Outputs:
    """Run a case on its backend; outputs on the CPU. The call stays as it is: what the operator writes goes to copies."""
    return copied(run_op(specs()[case.op], case.backend, to_device(clone(call), device_of(case.backend))))


def copied(outputs: Outputs) -> Outputs:
    """On the CPU, and never the memory that a backend gave: one that hands it out again must not change what is kept."""
    return {name: tensor.to("cpu", copy=True) for name, tensor in outputs.items()}


def golden(spec: OpSpec[..., Any], call: Call) -> Outputs:
    """The golden outputs: fp64 where they are floating, integers as they are."""
    if spec.golden is not None:
        mine = clone(call)
        returned = spec.golden(**mine)
    else:
        mine = clone(upcast(call))
        returned = spec.reference(**mine)
    return {name: t.double() if t.is_floating_point() else t for name, t in named_outputs(spec, returned, mine).items()}

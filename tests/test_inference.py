"""Every operator of the CPU in the surroundings that callers bring: gradients, autocast, fp64."""

from typing import Any

import pytest
import torch
from torch import Tensor

from m3_hw.dispatch import specs
from m3_hw.parity.cases import clone, golden, make_call, make_draw, run_op
from m3_hw.parity.checks import same_bits
from m3_hw.parity.results import Case
from m3_hw.spec import Call, OpSpec

BACKENDS = ["cpu", "reference"]


def first_call(op: str, dtype: str) -> tuple[OpSpec[..., Any], Call]:
    spec = specs()[op]
    return spec, make_call(Case(op, "cpu", dtype, spec.samples[0].name, "small"))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("op", sorted(specs()))
def test_inputs_that_require_gradients_are_accepted_and_nothing_is_recorded(op: str, backend: str) -> None:
    dtype = "bfloat16" if op == "dequantize_mxfp8" else "float32"
    spec, call = first_call(op, dtype)
    wanted = run_op(spec, backend, clone(call))
    tracked = clone(call)
    for name, value in tracked.items():
        if isinstance(value, Tensor) and value.is_floating_point() and name not in spec.mutates:
            value.requires_grad_()
    for name, tensor in run_op(spec, backend, tracked).items():
        assert tensor.grad_fn is None or tensor.grad_fn.name().endswith("WarnNotImplemented"), (
            "nothing inside is recorded, and backward warns"
        )
        assert same_bits(tensor.detach(), wanted[name])


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("op", sorted(specs()))
def test_autocast_changes_no_bit(op: str, dtype: str, backend: str) -> None:
    if op == "dequantize_mxfp8":
        dtype = "bfloat16"
    spec, call = first_call(op, dtype)
    wanted = run_op(spec, backend, clone(call))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        outputs = run_op(spec, backend, clone(call))
    for name, tensor in outputs.items():
        assert same_bits(tensor, wanted[name])


@pytest.mark.parametrize("op", sorted(specs().keys() - {"dequantize_mxfp8", "gemm_fp8", "quantize_fp8"}))  # these refuse fp64
def test_fp64_input_is_computed_in_fp64(op: str) -> None:
    """The reports hold fp32, bf16 and fp16; the contract takes fp64 too."""
    spec = specs()[op]
    for sample in spec.samples:
        if sample.tier != "small" or sample.dtypes is not None:
            continue
        call = sample.make(make_draw(Case(op, "cpu", "float64", sample.name, "small")), torch.float64)
        outputs = run_op(spec, "cpu", clone(call))
        for name, wanted in golden(spec, call).items():
            has = outputs[name]
            if not has.is_floating_point() or has.dtype.itemsize == 1:
                assert torch.equal(has.double().nan_to_num(7e9), wanted.double().nan_to_num(7e9)), f"{sample.name}: {name}"
            else:
                torch.testing.assert_close(
                    has.double(), wanted, rtol=1e-9, atol=1e-12, equal_nan=True, msg=lambda m, s=sample: f"{s.name}: {m}"
                )

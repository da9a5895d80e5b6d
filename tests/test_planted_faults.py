"""A fault planted in any operator of the CPU backend makes parity fail and name it: the harness can't pass by itself."""

import importlib
import inspect
import itertools
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from m3_hw import dispatch
from m3_hw.contract import PAGE_SIZE
from m3_hw.ops import select_blocks as select_blocks_spec
from m3_hw.parity.certify import certify
from m3_hw.parity.run import Options, run

Operator = Callable[..., Any]
Fault = Callable[[Operator, dict[str, Any]], Any]
"""Gets the right implementation and the call by argument name; returns, or writes, something wrong."""


@contextmanager
def planted(op: str, fault: Fault):
    """The CPU backend with a wrong implementation of one operator."""
    module = importlib.import_module(f"m3_hw.backends.cpu.{op}")
    right, names = getattr(module, op), list(dispatch.specs()[op].reference.__annotations__)

    def wrong(*args, **kwargs):
        return fault(right, {**dict(zip(names, args, strict=False)), **kwargs})

    wrong.__signature__ = inspect.signature(dispatch.specs()[op].reference)
    setattr(module, op, wrong)
    dispatch._operators[op]._table.clear()
    try:
        yield
    finally:
        setattr(module, op, right)
        dispatch._operators[op]._table.clear()


def with_arguments(**changes: Any) -> Fault:
    """The right operator, given wrong arguments."""
    return lambda right, call: right(**{**call, **{k: v(call) if callable(v) else v for k, v in changes.items()}})


def with_output(change: Callable[..., Any]) -> Fault:
    """The right result, spoilt afterwards."""
    return lambda right, call: change(right(**call), call)


def higher_block_wins_ties(right: Operator, call: dict[str, Any]) -> Any:
    """Flip the blocks, choose, flip back."""
    choose = select_blocks_spec.choose_blocks

    def flipped(scores: torch.Tensor, top_k: int, local_blocks: int, init_blocks: int) -> torch.Tensor:
        last = scores.shape[1] - 1
        forced = choose(scores, top_k, local_blocks, init_blocks)
        if local_blocks + init_blocks > 1:
            return forced
        scores = scores.clone()
        scores[:, last - local_blocks + 1 :] = torch.inf
        return (last - choose(scores.flip(-1), top_k, 0, 0)).sort(-1).values

    select_blocks_spec.choose_blocks = flipped
    try:
        return select_blocks_spec.select_blocks(**call)
    finally:
        select_blocks_spec.choose_blocks = choose


def whole_last_page(call: dict[str, Any]) -> torch.Tensor:
    return (call["seq_lens"] + PAGE_SIZE - 1) // PAGE_SIZE * PAGE_SIZE


def transposed_when_square(right: Operator, call: dict[str, Any]) -> Any:
    """Guesses the layout of block_ids by its shape."""
    ids = call["block_ids"]
    return right(**{**call, "block_ids": ids.transpose(0, 1) if ids.shape[0] == ids.shape[1] else ids})


def corrupt_last_row(out: torch.Tensor, call: dict[str, Any]) -> torch.Tensor:
    if len(out):
        out[-1] *= -1
    return out


def interleaved_halves(call: dict[str, Any]) -> torch.Tensor:
    x = call["gate_up"]
    return torch.cat([x[..., ::2], x[..., 1::2]], -1)


def add_one_to_first(result: Any) -> None:
    first = result[0] if isinstance(result, tuple) else result
    first.view(-1)[:1] += 1


_calls = itertools.count()


def drifts(right: Operator, call: dict[str, Any]) -> Any:
    """Another last bit at every other call."""
    out = right(**call)
    return torch.nextafter(out, torch.full_like(out, torch.inf)) if next(_calls) % 2 else out


def by_batch(right: Operator, call: dict[str, Any]) -> Any:
    """The last bit depends on how many sequences there are."""
    out, lse = right(**call)
    return (torch.nextafter(out, torch.full_like(out, torch.inf)) if len(call["seq_lens"]) > 1 else out), lse


def swap_experts_rows(result: Any, call: dict[str, Any]) -> Any:
    """Reverses the rows of the first expert: not stable."""
    rows, source, offsets = result
    end = int(offsets[offsets > 0][0]) if (offsets > 0).any() else 0
    rows[:end], source[:end] = rows[:end].flip(0), source[:end].flip(0)
    return rows, source, offsets


def writes_skipped_rows(right: Operator, call: dict[str, Any]) -> None:
    last = call["k_cache"].shape[0] * PAGE_SIZE - 1
    right(**{**call, "slots": torch.where(call["slots"] < 0, last, call["slots"])})


def changes_its_input(right: Operator, call: dict[str, Any]) -> Any:
    out = right(**call)
    call["weight"].mul_(0.5)
    return out


def biased_weights(right: Operator, call: dict[str, Any]) -> Any:
    _, ids = right(**call)
    s = torch.sigmoid(call["logits"].float()) + call["bias"]
    chosen = s.gather(-1, ids.long())
    return chosen / chosen.sum(-1, keepdim=True) * call["scale"], ids


FAULTS: dict[str, tuple[str, Fault]] = {
    "higher block wins ties": ("select_blocks", higher_block_wins_ties),
    "local block missing": ("select_blocks", with_arguments(local_blocks=0)),
    "initial block missing": ("select_blocks", with_arguments(init_blocks=0)),
    "heads pooled": ("select_blocks", with_output(lambda ids, _: ids[:1].expand_as(ids).contiguous())),
    "ids packed right": ("select_blocks", with_output(lambda ids, _: ids.flip(-1).contiguous())),
    "future block chosen": ("select_blocks", with_output(lambda ids, _: torch.where(ids >= 0, ids + 1, ids))),
    "tail unmasked in selection": ("select_blocks", with_arguments(seq_lens=whole_last_page)),
    "tail unmasked in sparse attention": ("sparse_attention", with_arguments(seq_lens=whole_last_page)),
    "tail unmasked in dense attention": ("dense_attention", with_arguments(seq_lens=whole_last_page)),
    "softmax scale off by 2": ("sparse_attention", with_arguments(scale=lambda call: call["scale"] * 2)),
    "output 8 times too large": ("dense_attention", with_output(lambda r, _: (r[0] * 8, r[1]))),
    "lse in base 2": ("sparse_attention", with_output(lambda r, _: (r[0], r[1] * 1.4427))),
    "lse not written": ("dense_attention", with_output(lambda r, _: (r[0], torch.full_like(r[1], 7.0)))),
    "layout guessed by shape": ("sparse_attention", transposed_when_square),
    "v_scale dropped": ("sparse_attention", with_arguments(v_scale=1.0)),
    "batch changes the bits": ("sparse_attention", by_batch),
    "vision attention scale": ("varlen_attention", with_arguments(scale=lambda call: call["scale"] * 1.1)),
    "plain norm without + 1": ("rms_norm", with_arguments(weight=lambda call: call["weight"].float() - 1)),
    "weight changed by the norm": ("rms_norm", changes_its_input),
    "bits drift between runs": ("rms_norm", drifts),
    "norm returns its input": ("rms_norm", lambda right, call: call["x"]),
    "residual not added": ("add_rms_norm", with_arguments(residual=lambda call: call["residual"] * 0)),
    "sine with the wrong sign": ("rope", with_arguments(sin=lambda call: -call["sin"])),
    "rope before the norm's + 1": ("qk_norm_rope", with_arguments(weight=lambda call: call["weight"].float() - 1)),
    "gate not limited": ("swiglu_oai", with_arguments(limit=1e30)),
    "alpha dropped": ("swiglu_oai", with_arguments(alpha=1.0)),
    "gate and up interleaved": ("swiglu_oai", with_arguments(gate_up=interleaved_halves)),
    "rows with slot -1 written": ("write_kv", writes_skipped_rows),
    "keys written as values": ("write_kv", with_arguments(v=lambda call: call["k"])),
    "bias inside the weights": ("route_tokens", biased_weights),
    "routed scale missing": ("route_tokens", with_arguments(scale=1.0)),
    "sort not stable": ("permute_tokens", with_output(swap_experts_rows)),
    "weights ignored": ("unpermute_tokens", with_arguments(weights=lambda call: torch.ones_like(call["weights"]))),
    "one corrupted row": ("grouped_gemm", with_output(corrupt_last_row)),
    "one corrupted token": ("moe_experts", with_output(corrupt_last_row)),
    "scale of 240 instead of 448": ("quantize_fp8", with_output(lambda r, _: (r[0], r[1] * (448 / 240)))),
    "a_scale dropped": ("gemm_fp8", with_arguments(a_scale=lambda call: torch.ones_like(call["a_scale"]))),
    "exponent bias of 126": ("dequantize_mxfp8", with_output(lambda w, _: w * 2)),
}
EXPECTED_CHECK = {
    "batch changes the bits": "batch_invariance",
    "weight changed by the norm": "inputs_unchanged",
    "bits drift between runs": "repeatability",
    "norm returns its input": "no_alias",
}


@pytest.mark.parametrize("name", FAULTS)
def test_parity_fails_and_names_the_operator(name: str) -> None:
    op, fault = FAULTS[name]
    dtype = "bfloat16" if op == "dequantize_mxfp8" else "float32"
    fast = tuple(set(_checks()) - {"opcheck", "compile", "export"})
    with planted(op, fault):
        report = run(Options(ops=(op,), backends=("cpu",), dtypes=(dtype,), checks=fast))
    failures = [result for result in report.results if result.status == "fail"]
    assert not report.passed
    assert failures
    assert all(result.case.op == op and result.message for result in failures)
    assert EXPECTED_CHECK.get(name, "parity") in {result.check for result in failures}


def _checks() -> list[str]:
    from m3_hw.parity.checks import CHECKS

    return sorted(CHECKS)


def test_every_operator_has_a_planted_fault() -> None:
    assert {op for op, _ in FAULTS.values()} == set(dispatch.specs())


@pytest.mark.parametrize("name", ["one corrupted row", "heads pooled", "plain norm without + 1", "tail unmasked in dense attention"])
def test_certify_fails_and_counts_the_cases(name: str) -> None:
    op, fault = FAULTS[name]
    with planted(op, fault):
        report = certify(Options(ops=(op,), backends=("cpu",), dtypes=("float32",)), cases=10)
    assert not report.passed
    assert report.results[0].message.startswith("random_")


@pytest.mark.parametrize("op", ["rms_norm", "route_tokens"])
def test_parity_passes_without_a_fault(op: str) -> None:
    assert run(Options(ops=(op,), backends=("cpu",), dtypes=("float32",), checks=("parity",))).passed

"""The certify tier: any number of random cases per operator, drawn from a seed, resumable.

Each case draws shapes, lengths and a range of values (`draw.RANGES`), then strides, an order of pages, and what the memory that
nobody owns holds; its outputs are judged like any other's. Results are summed up per operator, backend and dtype.
"""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from m3_hw.draw import Draw
from m3_hw.errors import BundleError
from m3_hw.parity.cases import RANDOM, make_draw
from m3_hw.parity.checks import Subject, failed, permuted_pages, poisoned, with_gaps, with_reversed_axes
from m3_hw.parity.judge import Judgement
from m3_hw.parity.metrics import worse
from m3_hw.parity.results import Case, Report, Result
from m3_hw.parity.run import Options, Progress, absence, listed_gap, new_report
from m3_hw.spec import Call

TIER = "certify"
SAVE_EVERY_SECONDS = 5.0
MOST_MESSAGES = 5
"""Failures that a summed-up result quotes; the others are counted."""


def certify(options: Options, *, cases: int, state: Path | None = None, command: str = "", progress: Progress | None = None) -> Report:
    """Judge `cases` random cases of each operator on each backend, its dtypes in turn.

    Args:
        options: Operators, backends, dtypes and the seed; samples, tiers and checks don't apply.
        cases: Cases of each operator and backend.
        state: File that keeps what is done, so that a run that was cut off goes on; None keeps nothing.
        command: What the report says it was made by.
        progress: Called after each case.

    Returns:
        The report: one result per operator, backend and dtype, with the worst metrics and the sums of counts.

    Raises:
        ContractError: The options name something unknown.
        BundleError: The state file is damaged, or of another run.
    """
    lines = _lines(options)
    results = _load(state, options, cases)
    report = new_report(options, sorted({line.backend for line in lines}), command)
    report.tier = TIER
    saved, total = time.monotonic(), len({(line.op, line.backend) for line in lines}) * cases
    for line, share in zip(lines, _shares(lines, cases), strict=True):
        result = results.get(line.id) or absence(line) or Result(line, "parity", "pass", cases=0)
        results[line.id] = result
        if result.status == "unavailable" or line.id != result.case.id:
            result.case = line
            continue
        for number in share[result.cases :]:
            case = Case(line.op, line.backend, line.dtype, f"{RANDOM}{number}", TIER)
            _add(result, case, _judge(case, options.seed))
            if progress:
                progress(result, sum(r.cases for r in results.values()), total)
            if state and time.monotonic() - saved > SAVE_EVERY_SECONDS:
                _save(state, options, cases, results)
                saved = time.monotonic()
    if state:
        _save(state, options, cases, results)
    report.results = [results[line.id] for line in lines]
    return report


def _lines(options: Options) -> list[Case]:
    """One case per operator, backend and dtype, which stands for all of its random ones."""
    every = Options(options.ops, options.backends, options.dtypes, tiers=("small",), seed=options.seed).cases()
    return sorted({Case(case.op, case.backend, case.dtype, "random", TIER) for case in every})


def _shares(lines: list[Case], cases: int) -> list[range]:
    """The numbers of each line's cases: those of one operator and backend, dealt out in turn."""
    shares = []
    for line in lines:
        dtypes = [other.dtype for other in lines if (other.op, other.backend) == (line.op, line.backend)]
        shares.append(range(dtypes.index(line.dtype), cases, len(dtypes)))
    return shares


def _judge(case: Case, seed: int) -> Judgement:
    subject = Subject(case, seed)
    draw = make_draw(case, seed + 1)
    try:
        call, orders = _varied(subject, draw)
        outputs = subject.run_there(call)
        restored = {name: t.cpu() if name not in orders else t.cpu().index_select(0, orders[name]) for name, t in outputs.items()}
        if subject.spec.mutates:
            restored = {name: t.contiguous() for name, t in restored.items()}
        return subject.judge(restored)
    except Exception as error:  # noqa: BLE001, the boundary between the harness and what it tests
        return failed(f"{type(error).__name__}: {error}")


def _varied(subject: Subject, draw: Draw) -> tuple[Call, dict[str, Tensor]]:
    """The call with drawn strides, pages and poison, on the device, and the caches' new orders of pages.

    What is written keeps its unowned memory, which the golden outputs hold too.
    """
    call: Call = subject.call
    if subject.spec.unowned is not None and (fill := draw.choice((None, torch.nan, 1e4))) is not None:
        masks = {k: mask for k, mask in subject.spec.unowned(call).items() if k not in subject.spec.mutates}
        call = poisoned(call, masks, fill)
    call, orders = permuted_pages(subject.spec, call, draw.permutation)
    call = subject.on_device(call)
    for name, value in call.items():
        if isinstance(value, Tensor) and value.dim():
            layout = draw.integer(0, 3)
            call[name] = (value, with_gaps(value)[0] if layout == 1 else value, with_reversed_axes(value) if layout == 2 else value)[layout]
    return call, orders


def _add(result: Result, case: Case, judgement: Judgement) -> None:
    """Put one more case into a line's result."""
    result.cases += 1
    for output, metrics in judgement.metrics.items():
        before = result.metrics.get(output)
        result.metrics[output] = worse(before, metrics) if before else metrics
    result.tolerance = judgement.tolerance or result.tolerance
    if not judgement.passed:
        gap = listed_gap(result.case, "parity")
        if gap:
            result.status, result.message = ("gap" if result.status == "pass" else result.status), gap.reason
            return
        result.status = "fail"
        if result.message.count("\n") < MOST_MESSAGES:
            result.message += f"{case.sample}: {judgement.message}\n"


def _key(options: Options, cases: int) -> dict[str, Any]:
    return {"options": json.loads(json.dumps(asdict(options))), "cases": cases}


def _save(state: Path, options: Options, cases: int, results: dict[str, Result]) -> None:
    temporary = state.with_name(state.name + ".part")
    temporary.write_text(json.dumps({**_key(options, cases), "results": [asdict(r) for r in results.values()]}), encoding="utf-8")
    os.replace(temporary, state)


def _load(state: Path | None, options: Options, cases: int) -> dict[str, Result]:
    if state is None or not state.exists():
        return {}
    try:
        data = json.loads(state.read_text(encoding="utf-8"))
        results = [Result(**{**r, "case": Case(**r["case"])}) for r in data.pop("results")]
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise BundleError(f"state file {state} is damaged: {error}") from None
    if data != _key(options, cases):
        raise BundleError(f"state file {state} is of another run: has {data}; this one: {_key(options, cases)}")
    return {result.case.id: result for result in results}

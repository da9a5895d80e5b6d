"""Judges outputs against the golden ones by the spec's rules. A backend can't widen them."""

from collections.abc import Iterable
from dataclasses import asdict
from itertools import combinations, pairwise, product
from typing import Any, NamedTuple

import torch
from torch import Tensor

from m3_hw.parity.metrics import Metrics, finite, measure, nonfinite_mismatch, ulp_distance
from m3_hw.spec import Call, OpSpec, Tolerance

Outputs = dict[str, Tensor]
"""What an operator returned or wrote, by output name."""


class Judgement(NamedTuple):
    """The verdict on a case: `message` says what is wrong; metrics and tolerance are by output."""

    passed: bool
    message: str = ""
    metrics: dict[str, Metrics] = {}  # noqa: RUF012, a NamedTuple's default is never mutated
    tolerance: dict[str, dict[str, Any]] = {}  # noqa: RUF012


def judge(spec: OpSpec[..., Any], call: Call, dtype: torch.dtype, actual: Outputs, golden: Outputs) -> Judgement:
    """Compare every output with the golden one.

    Args:
        spec: The operator's.
        call: The inputs, on the CPU; read only to score near ties.
        dtype: Of the data, which picks the tolerance.
        actual: Outputs on the CPU, in their own dtypes.
        golden: fp64 outputs (integers as they are).

    Returns:
        The verdict with every metric, and the rule that decided each output.
    """
    metrics: dict[str, Metrics] = {}
    problems = []
    agreeing: Tensor | None = None
    for output, limits in ((name, spec.tolerances[name][dtype]) for name in _selections_first(spec, golden, dtype)):
        a, g = actual[output], golden[output]
        if a.shape != g.shape:
            problems.append(f"{output} has shape {list(a.shape)}; wanted: {list(g.shape)}")
            continue
        if limits.rule == "selection":
            metrics[output], problem, agreeing = _judge_selection(spec, call, a, g, limits)
        else:
            if agreeing is not None:
                a, g = _aligned(a, actual, agreeing), _aligned(g, golden, agreeing)
            metrics[output] = measure(a, g, limits.unit) if a.is_floating_point() else {"elements": a.numel()}
            problem = _RULES[limits.rule](a, g, limits, metrics[output])
        if problem:
            problems.append(f"{output}: {problem}")
    tolerance = {output: asdict(spec.tolerances[output][dtype]) for output in golden}
    return Judgement(not problems, "; ".join(problems), metrics, tolerance)


def _selections_first(spec: OpSpec[..., Any], golden: Outputs, dtype: torch.dtype) -> list[str]:
    return sorted(golden, key=lambda name: spec.tolerances[name][dtype].rule != "selection")


def _nonfinite(actual: Tensor, golden: Tensor) -> str:
    wrong = nonfinite_mismatch(actual, golden.to(actual.dtype))
    if not wrong.any():
        return ""
    at = wrong.nonzero()[0].tolist()
    return f"NaN or inf differ at {int(wrong.sum())} of {wrong.numel()} elements, first at {at}: has {actual[*at]}, wanted {golden[*at]}"


def _judge_exact(actual: Tensor, golden: Tensor, limits: Tolerance, metrics: Metrics) -> str:
    a, g = actual.double(), golden.to(actual.dtype).double()
    wrong = ~((a == g) | (a.isnan() & g.isnan()))
    metrics["mismatches"] = int(wrong.sum())
    if not wrong.any():
        return ""
    at = wrong.nonzero()[0].tolist()
    return f"{int(wrong.sum())} of {wrong.numel()} elements differ, first at {at}: has {a[*at].item()}, wanted {g[*at].item()}"


def _judge_ulp(actual: Tensor, golden: Tensor, limits: Tolerance, metrics: Metrics) -> str:
    if problem := _nonfinite(actual, golden):
        return problem
    if not actual.numel():
        return ""
    a, g = (x.to(actual.dtype) for x in finite(actual, golden.to(actual.dtype)))
    floor = limits.floor * g.double().abs().amax(-1, keepdim=True)
    distance = ulp_distance(a, g).masked_fill((a.double() - g.double()).abs() <= floor, 0)
    metrics["judged_ulp"] = worst = int(distance.max())
    if worst <= limits.limit:
        return ""
    at = (distance == worst).nonzero()[0].tolist()
    return f"{worst} ULP at {at}, limit {limits.limit:g}: has {actual[*at]}, wanted {golden[*at].item():.9g}"


def _judge_rel_l2(actual: Tensor, golden: Tensor, limits: Tolerance, metrics: Metrics) -> str:
    if problem := _nonfinite(actual, golden):
        return problem
    if not actual.numel():
        return ""
    problems = []
    if not metrics["rel_l2"] <= limits.limit:
        problems.append(f"rel_l2 {metrics['rel_l2']:.3g}, limit {limits.limit:g}")
    row = metrics["worst_row"]
    if not row["rel_l2"] <= limits.worst_row:
        problems.append(f"row {row['row']} has rel_l2 {row['rel_l2']:.3g}, limit {limits.worst_row:g}")
    return ", ".join(problems)


_RULES = {"exact": _judge_exact, "ulp": _judge_ulp, "rel_l2": _judge_rel_l2}


def _judge_selection(spec: OpSpec[..., Any], call: Call, actual: Tensor, golden: Tensor, limits: Tolerance) -> tuple[Metrics, str, Tensor]:
    """Metrics, what is wrong, and a mask of the rows whose sets agree: [...] of ids [..., K]."""
    a, g = actual.long().sort(-1).values, golden.long().sort(-1).values
    agreeing = (a == g).all(-1)
    metrics: Metrics = {"rows": agreeing.numel(), "equal_rows": int(agreeing.sum()), "near_tie_rows": 0, "wrong_rows": 0}
    if bool((actual == golden).all()):
        return metrics, "", agreeing
    assert spec.scores is not None, f"{spec.name} has a selection and no scores"
    scores = spec.scores(call)
    wrong = []
    for row in (actual != golden).any(-1).nonzero().tolist():
        problem = _judge_row(actual[*row], golden[*row], scores[*row], limits)
        if problem:
            wrong.append(f"row {row}: {problem}")
        elif not agreeing[*row]:
            metrics["near_tie_rows"] += 1
    metrics["wrong_rows"] = len(wrong)
    return metrics, f"{len(wrong)} of {agreeing.numel()} rows wrong; {wrong[0]}" if wrong else "", agreeing


def _judge_row(actual: Tensor, golden: Tensor, scores: Tensor, limits: Tolerance) -> str:
    """What is wrong with one row of ids that differs from the golden one; empty for a near tie."""
    has: list[int] = actual.tolist()
    wanted: list[int] = golden.tolist()
    valid = [i for i in has if i >= 0]
    if has[: len(valid)] != valid or len(valid) != sum(i >= 0 for i in wanted) or any(i < -1 for i in has):
        return f"has {has}; wanted {wanted}: as many ids, packed left, then -1"
    if len(set(valid)) < len(valid):
        return f"has {has}: an id is repeated"
    if any(i >= len(scores) or scores[i] == -torch.inf for i in valid):
        return f"has {has}: an id is no candidate; wanted {wanted}"
    margin = limits.margin * _largest(scores)
    values = [scores[i].item() for i in valid]
    if limits.order == "id" and valid != sorted(valid):
        return f"has {has}: ids must ascend"
    if limits.order == "score" and any(b > a + margin for a, b in pairwise(values)):
        return f"has {has}: scores must descend; wanted {wanted}"
    if limits.order == "score" and (tie := _first_tie([(a, b) for a, b in combinations(valid, 2) if a > b], scores)):
        return f"has {has}; wanted {wanted}: {tie[0]} before {tie[1]} of equal score"
    missing, extra = {i for i in wanted if i >= 0}.difference(valid), set(valid).difference(wanted)
    if tie := _first_tie(product(sorted(extra), sorted(missing)), scores):
        return f"has {has}; wanted {wanted}: {tie[0]} in the place of {tie[1]} of equal score"
    kth = min((scores[i].item() for i in wanted if i >= 0), default=0.0)
    for i in missing | extra:
        score = scores[i].item()
        if not abs(score - kth) <= margin:
            what = "forced" if score == torch.inf else f"score {score:.9g}, {abs(score - kth):.3g} from the K-th, margin {margin:.3g}"
            return f"has {has}; wanted {wanted}: {i} ({what})"
    return ""


def _first_tie(pairs: Iterable[tuple[int, int]], scores: Tensor) -> tuple[int, int] | None:
    """The first pair of exactly equal scores: the contract's tie rule decides those, so that they are no near ties.

    Scores equal in fp64 come of equal inputs, which give equal scores at any precision.
    """
    return next((pair for pair in pairs if scores[pair[0]] == scores[pair[1]]), None)


def _largest(scores: Tensor) -> float:
    """Largest magnitude among true scores: stand-ins for NaN and inf are 1e30 and above."""
    true = scores[scores.abs() < 1e30]
    return true.abs().max().item() if true.numel() else 0.0


def _aligned(values: Tensor, outputs: Outputs, agreeing: Tensor) -> Tensor:
    """A companion of the ids [..., K], in the order of the ids, on the rows whose sets agree."""
    ids = next(t for t in outputs.values() if not t.is_floating_point() and t.shape == values.shape)
    return values.gather(-1, ids.long().argsort(dim=-1, stable=True))[agreeing]

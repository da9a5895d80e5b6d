"""Runs checks on cases and says what was found, gap by gap."""

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime

from m3_hw.backend import Gap
from m3_hw.dispatch import backends, specs
from m3_hw.environment import environment
from m3_hw.errors import NotSupportedError
from m3_hw.parity.cases import accepted, find_cases, find_sample
from m3_hw.parity.checks import CHECKS, Subject, applicable, simulated
from m3_hw.parity.judge import Judgement
from m3_hw.parity.results import Case, Report, Result

Progress = Callable[[Result, int, int], None]
"""Called after each result: the result, cases done, cases in all."""


@dataclass(frozen=True)
class Options:
    """What to run; None means all. Checks default to those of each case's tier."""

    ops: tuple[str, ...] | None = None
    backends: tuple[str, ...] | None = None
    dtypes: tuple[str, ...] | None = None
    samples: tuple[str, ...] | None = None
    tiers: tuple[str, ...] = ("small",)
    checks: tuple[str, ...] | None = None
    seed: int = 0

    def cases(self) -> list[Case]:
        """The cases that these options name, sorted.

        Raises:
            ContractError: An unknown name; lists the known ones.
        """
        accepted("check", self.checks, CHECKS)
        return find_cases(ops=self.ops, backends=self.backends, dtypes=self.dtypes, tiers=self.tiers, samples=self.samples)


def new_report(options: Options, used: Sequence[str], command: str) -> Report:
    """A report without results yet."""
    return Report(
        tier=",".join(options.tiers),
        seed=options.seed,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        environment=environment(),
        simulated=[name for name in used if not missing_reasons(name) and simulated(name)],
    )


def run(options: Options, *, command: str = "", progress: Progress | None = None) -> Report:
    """Run every check on every case.

    Args:
        options: What to run.
        command: What the report says it was made by.
        progress: Called after each result.

    Returns:
        The report; failures are results in it, not exceptions.

    Raises:
        ContractError: The options name something unknown.
    """
    cases = options.cases()
    report = new_report(options, sorted({case.backend for case in cases}), command)
    for done, case in enumerate(cases, 1):
        for result in _results(case, options, report):
            report.results.append(result)
            if progress:
                progress(result, done, len(cases))
    return report


def _results(case: Case, options: Options, report: Report) -> Iterator[Result]:
    if absent := absence(case):
        if absent not in report.results[-1:]:  # one for all samples
            yield absent
        return
    subject = Subject(case, options.seed)
    for name in applicable(subject, options.checks):
        yield check_case(subject, name)


def missing_reasons(backend: str) -> list[str]:
    """Why a backend can't be used in this process; empty if it can."""
    return [] if backend == "reference" else backends()[backend].unavailable_reasons()


def absence(case: Case) -> Result | None:
    """One result for all samples of an operator that the backend hasn't, or can't run here; None if it can."""
    if case.backend == "reference":
        return None
    backend = backends()[case.backend]
    whole = replace(case, sample="all")
    if not backend.has(case.op):
        listed = any(gap.op == case.op for gap in backend.gaps)
        return Result(whole, "parity", "gap" if listed else "fail", backend.missing_reason(case.op))
    if reasons := backend.unavailable_reasons():
        return Result(whole, "parity", "unavailable", "; ".join(reasons))
    return None


def check_case(subject: Subject, name: str) -> Result:
    """Run one check on one case, and hold its outcome against unsupported.toml, strict both ways."""
    start = time.perf_counter()
    judgement = judged(subject, name)
    seconds = time.perf_counter() - start
    case, gap = subject.case, listed_gap(subject.case, name)
    result = Result(case, name, "pass", "", seconds, 1, judgement.metrics, judgement.tolerance, find_sample(case).note)
    if not judgement.passed:
        result.status, result.message = ("gap", f"{gap.reason} ({judgement.message})") if gap else ("fail", judgement.message)
    elif gap and (gap.checks or name == "parity"):
        result.status, result.message = "fail", f"unsupported.toml lists this as a gap ({gap.reason}), but it passes: remove the entry"
    return result


def judged(subject: Subject, name: str) -> Judgement:
    """The check's verdict; whatever a backend raises is a failure, not the end of the run."""
    try:
        return CHECKS[name].function(subject)
    except NotSupportedError as error:
        return Judgement(False, f"not supported: {error}")
    except Exception as error:  # noqa: BLE001, the boundary between the harness and what it tests
        return Judgement(False, f"{type(error).__name__}: {error}")


def listed_gap(case: Case, check: str) -> Gap | None:
    """The backend's gap that covers a check on a case, if there is one."""
    for gap in backends()[case.backend].gaps if case.backend != "reference" else ():
        named = ((gap.dtypes, case.dtype), (gap.samples, case.sample), (gap.checks, check))
        if gap.op == case.op and all(not names or name in names for names, name in named):
            return gap
    return None


def stale_gaps(backend: str) -> list[str]:
    """Entries of a backend's unsupported.toml that name what doesn't exist, or an operator that is there as wholly missing."""
    known, problems = specs(), []
    for gap in backends()[backend].gaps:
        samples = {sample.name for sample in known[gap.op].samples} if gap.op in known else set()
        dtypes = {str(dtype).removeprefix("torch.") for dtype in known[gap.op].dtypes} if gap.op in known else set()
        for what, names, options in (
            ("op", (gap.op,), known.keys()),
            ("samples", gap.samples, samples),
            ("dtypes", gap.dtypes, dtypes),
            ("checks", gap.checks, CHECKS.keys()),
        ):
            problems += [
                f"gap of {gap.op}: {what} has {name!r}; accepted: {', '.join(sorted(options))}" for name in names if name not in options
            ]
    return problems

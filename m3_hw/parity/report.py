"""What people and CI read of a report: a terminal table, a Markdown table, JUnit XML and one self-contained page."""

import json
import math
import re
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from importlib.resources import files
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from m3_hw.errors import M3HWError
from m3_hw.parity.results import Report, Result, Status

SHORT = {"float64": "fp64", "float32": "fp32", "bfloat16": "bf16", "float16": "fp16", "float8_e4m3fn": "fp8"}
"""How the tables call the dtypes."""

STYLES: dict[Status, str] = {"pass": "green", "fail": "bold red", "gap": "yellow", "unavailable": "dim"}
WORST_FIRST: tuple[Status, ...] = ("fail", "pass", "gap", "unavailable")


class Deciding(NamedTuple):
    """The number that the rule judges, against its limit."""

    output: str
    metric: str
    value: float
    limit: float
    rule: str

    @property
    def used(self) -> float:
        """Share of the limit used up: above 1 fails. Anything but a finite number is the worst there is."""
        if not math.isfinite(self.value):
            return math.inf
        if self.limit == 0:
            return 0.0 if self.value == 0 else math.inf
        return self.value / self.limit

    def __str__(self) -> str:
        return f"{self.output}: {self.metric} {number(self.value)}, limit {number(self.limit)}"


def number(value: float | None) -> str:
    """Three significant digits; whole numbers as they are."""
    if value is None:
        return ""
    if not math.isfinite(value):
        return "NaN" if math.isnan(value) else str(value)
    if value == int(value) and abs(value) < 1e6:
        return str(int(value))
    return f"{value:.3g}" if 1e-3 <= abs(value) < 1e6 else f"{value:.2e}"


def printable(text: str) -> str:
    """The text with whatever XML and terminals can't take (control characters, lone surrogates) spelled out."""
    return re.sub(r"[^\t\n\r\x20-\x7e\xa0-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", _escape, text)


def _escape(match: re.Match[str]) -> str:
    code = ord(match[0])
    return f"\\x{code:02x}" if code < 256 else f"\\u{code:04x}"


def deciding(result: Result) -> Deciding | None:
    """The number nearest to its limit, or furthest beyond, over all outputs; None where nothing was measured."""
    return max(_deciding(result), key=lambda d: d.used, default=None)


def _deciding(result: Result) -> Iterator[Deciding]:
    for output, tolerance in result.tolerance.items():
        metrics = result.metrics.get(output, {})
        for name, path, limit in DECIDES[tolerance["rule"]]:
            value = _at(metrics, path)
            if value or (value is not None and name != NONFINITE[0]):
                yield Deciding(output, name, value, tolerance.get(limit, 0.0), tolerance["rule"])


def _at(metrics: Any, path: tuple[str, ...]) -> Any:
    """What stands at a path of keys; None where there is nothing."""
    for key in path:
        metrics = metrics.get(key) if isinstance(metrics, dict) else None
    return metrics


NONFINITE = ("misplaced NaN or inf", ("nonfinite_mismatches",), "")
DECIDES = {
    "exact": (("mismatches", ("mismatches",), ""),),
    "ulp": (("ULP", ("judged_ulp",), "limit"), NONFINITE),
    "rel_l2": (("rel_l2", ("rel_l2",), "limit"), ("worst row", ("worst_row", "rel_l2"), "worst_row"), NONFINITE),
    "selection": (("wrong rows", ("wrong_rows",), ""),),
}
"""Which numbers decide, by rule: name, place in the metrics, and the tolerance's field that limits it ("": 0)."""


@dataclass(frozen=True)
class Row:
    """All results of one operator on one backend in one dtype."""

    op: str
    backend: str
    dtype: str
    simulated: bool
    results: list[Result]

    @cached_property
    def counts(self) -> Counter[Status]:
        """Number of results by status."""
        return Counter(result.status for result in self.results)

    @property
    def verdict(self) -> Status:
        """fail if anything failed, else pass if anything passed, else gap if anything is a gap."""
        return next(status for status in WORST_FIRST if self.counts[status])

    @property
    def label(self) -> str:
        """The verdict, with the number of gaps beside what passed or failed."""
        gaps = self.counts["gap"] if self.verdict in ("pass", "fail") else 0
        return self.verdict + (f", {gaps} gap{'s' * (gaps > 1)}" if gaps else "")

    @property
    def cases(self) -> int:
        """Cases that ran: a check of the certify tier stands for many."""
        ran: dict[tuple[str, str], int] = {}
        for r in self.results:
            if r.status in ("pass", "fail"):
                key = (r.case.tier, r.case.sample)
                ran[key] = max(ran.get(key, 0), r.cases)
        return sum(ran.values())

    @property
    def checks(self) -> int:
        """Checks that ran, over all cases."""
        return self.counts["pass"] + self.counts["fail"]

    @cached_property
    def worst(self) -> tuple[Result, Deciding] | None:
        """The measured case that is nearest to its limit; a failed one if there is any."""
        measured = [(r, d) for r in self.results if (d := deciding(r)) is not None]
        return max(measured, key=lambda pair: (pair[0].status == "fail", pair[1].used), default=None)

    @property
    def reason(self) -> str:
        """Why nothing ran, or what the gaps are."""
        return "; ".join(dict.fromkeys(r.message for r in self.results if r.status in ("gap", "unavailable") and r.message))

    @property
    def unmeasured(self) -> str:
        """What to say where a worst case would stand: which check failed, else the level reached, else why nothing ran."""
        failed = next((f"{r.case.sample}: {r.check}" for r in self.results if r.status == "fail"), "")
        return failed or (f"double benchmark {self.level}" if self.level else self.reason)

    @property
    def level(self) -> str | None:
        """Level of Ascend's double benchmark that every case reaches, of a comparison of two recordings."""
        found: list[Any] = self.numbers("double_benchmark", "level")
        return min(found, key=("none", "L0", "L1", "L2").index, default=None)

    def numbers(self, *path: str) -> list[float]:
        """Every value of one metric, over results and outputs."""
        found = (_at(metrics, path) for result in self.results for metrics in result.metrics.values())
        return [value for value in found if value is not None]

    def largest(self, *path: str) -> float | None:
        """The worst value of a metric: NaN, then inf, then the largest."""
        return max(self.numbers(*path), key=lambda v: (math.isnan(v), v), default=None)

    @property
    def near_ties(self) -> int | None:
        """Rows of selections that differ only by near ties; None where nothing is selected."""
        found = self.numbers("near_tie_rows")
        return int(sum(found)) if found else None

    @property
    def ascend_mixed(self) -> Status | None:
        """Verdict of Ascend's mixed tolerance over all measured outputs; None where it doesn't apply."""
        found = self.numbers("ascend_mixed", "passed")
        return None if not found else "pass" if all(found) else "fail"


def rows(report: Report) -> list[Row]:
    """The report by operator, backend and dtype, sorted."""

    def key(result: Result) -> tuple[str, str, str]:
        return result.case.op, result.case.backend, result.case.dtype

    groups = groupby(sorted(report.results, key=key), key=key)
    return [Row(op, backend, dtype, _simulated(report, backend), list(found)) for (op, backend, dtype), found in groups]


def _simulated(report: Report, backend: str) -> bool:
    """Also of a comparison, "cuda vs ascend"."""
    return any(name in report.simulated for name in (backend, *backend.split(" vs ")))


def terminal_table(report: Report) -> RenderableType:
    """One line per operator, backend and dtype, then every failure.

    Args:
        report: What a run found.

    Returns:
        A rich renderable.
    """
    table = Table(title=_title(report), title_justify="left", box=None, padding=(0, 1, 0, 0), header_style="underline")
    for column in ("operator", "backend", "dtype"):
        table.add_column(column, no_wrap=True)
    table.add_column("verdict", overflow="fold", min_width=8)
    for column in ("cases", "checks"):
        table.add_column(column, justify="right", no_wrap=True)
    table.add_column("worst case", overflow="fold")
    table.add_column("near ties", justify="right", min_width=4)
    table.add_column("Ascend mixed", min_width=6)
    for row, dtypes in _merged(rows(report)):
        table.add_row(
            *map(Text, (printable(row.op), printable(row.backend) + "\nsimulated" * row.simulated, dtypes)),
            Text(row.label, style=STYLES[row.verdict]),
            str(row.cases),
            str(row.checks),
            Text(_worst(row)),
            number(row.near_ties),
            Text(row.ascend_mixed or "", style=STYLES[row.ascend_mixed] if row.ascend_mixed else ""),
        )
    return Group(table, *_failures(report))


def _merged(found: list[Row]) -> Iterator[tuple[Row, str]]:
    """Rows with their dtypes: one line for all dtypes of an operator that a backend lacks for one reason."""

    def key(row: Row) -> tuple[str, ...]:
        return (row.op, row.backend, row.reason, "" if row.checks == 0 else row.dtype)

    for _, group in groupby(found, key=key):
        alike = list(group)
        yield alike[0], " ".join(SHORT.get(row.dtype, row.dtype) for row in alike)


def _title(report: Report) -> Text:
    verdict = Text("passed" if report.passed else "FAILED", style="bold green" if report.passed else "bold red")
    counts = ", ".join(f"{count} {status}" for status, count in report.summary.items() if count) or "nothing ran"
    title = Text.assemble("Parity ", verdict, f": {counts} (tier {report.tier}, seed {report.seed})")
    if report.simulated:
        title.append(f"\nsimulated, not on hardware: {', '.join(report.simulated)}", style="bold yellow")
    return title


def _worst(row: Row) -> str:
    if row.worst is None:
        return printable(row.unmeasured)
    result, found = row.worst
    return printable(f"{result.case.sample}, {found}")


def _failures(report: Report) -> Iterable[Text]:
    failed = [r for r in report.results if r.status == "fail"]
    if failed:
        yield Text(f"\n{len(failed)} failed:", style="bold red")
    for r in failed:
        simulated = " (simulated)" * _simulated(report, r.case.backend)
        yield Text.assemble((printable(r.case.op), "bold"), f"  {printable(r.case.id)}{simulated}  {r.check}")
        yield Text("    " + printable(r.message).replace("\n", "\n    "))


def markdown_table(report: Report) -> str:
    """Operators by backends: what passes in which dtypes, and what is missing why.

    Args:
        report: What a run found.

    Returns:
        A Markdown table, without a trailing newline.
    """
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows(report):
        found.setdefault((row.op, row.backend), []).append(row)
    backends = _in_order(report)
    lines = [["operator", *map(_markdown, backends)], ["---"] * (len(backends) + 1)]
    lines += [[f"`{op}`", *(_cell(found.get((op, backend), [])) for backend in backends)] for op in sorted({op for op, _ in found})]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _in_order(report: Report) -> list[str]:
    """The built-in backends first, as they are named everywhere else, then the plugins."""
    order = ("cpu", "cuda", "ascend")
    return sorted({r.case.backend for r in report.results}, key=lambda b: (order.index(b) if b in order else len(order), b))


def _cell(group: list[Row]) -> str:
    if not group:
        return "–"  # noqa: RUF001 (an en dash is what a table's empty cell holds)
    parts: dict[str, list[str]] = {}
    for row in sorted(group, key=lambda r: (WORST_FIRST.index(r.verdict), list(SHORT).index(r.dtype) if r.dtype in SHORT else 99)):
        parts.setdefault(_cell_verdict(row), []).append(SHORT.get(row.dtype, row.dtype))
    if len(parts) == 1 and group[0].verdict in ("gap", "unavailable"):
        text = next(iter(parts))
    else:
        text = "; ".join(f"{verdict} {' '.join(dtypes)}" for verdict, dtypes in parts.items())
    return "simulated: " * group[0].simulated + text


def _cell_verdict(row: Row) -> str:
    if row.verdict == "fail":
        return "**fail**"
    if row.verdict == "pass":
        return row.label
    return _markdown(row.reason or row.verdict)


def _markdown(text: str) -> str:
    """One line of text that means nothing to Markdown."""
    return re.sub(r"([|<`*_\\])", r"\\\1", " ".join(printable(text).split()))


def update_markdown(path: Path, report: Report, marker: str = "parity-table") -> None:
    """Replace what stands between `<!-- marker -->` and `<!-- /marker -->` by the report's table.

    Args:
        path: A Markdown file that holds both markers once, in this order.
        report: What a run found.
        marker: Name of the markers.

    Raises:
        M3HWError: The markers are missing, repeated or in the wrong order.
    """
    text = path.read_text(encoding="utf-8")
    start, end = f"<!-- {marker} -->", f"<!-- /{marker} -->"
    if text.count(start) != 1 or text.count(end) != 1 or text.index(end) < text.index(start):
        raise M3HWError(f"{path} has {text.count(start)} {start!r} and {text.count(end)} {end!r}; accepted: one of each, in this order")
    before, rest = text.split(start)
    after = rest.split(end)[1]
    path.write_text(f"{before}{start}\n{markdown_table(report)}\n{end}{after}", encoding="utf-8")


def save_junit(report: Report, path: Path) -> None:
    """Write JUnit XML: a suite per operator, a test per case and check; gaps and what is unavailable are skipped.

    Args:
        report: What a run found.
        path: File to write.
    """
    root = ET.Element("testsuites", {"name": "m3_hw parity", **_totals(report.results)})
    by_op = groupby(sorted(report.results, key=lambda r: r.case.op), key=lambda r: r.case.op)
    for number_of_suite, (op, group) in enumerate(by_op):
        found = list(group)
        suite = ET.SubElement(root, "testsuite", {"name": printable(op), "id": str(number_of_suite), **_totals(found)})
        suite.set("timestamp", re.sub(r"(\.\d+)?(Z|\+00:00)$", "", report.created))  # the schema allows no zone
        properties = ET.SubElement(suite, "properties")
        facts = {"tier": report.tier, "seed": report.seed, "command": report.command, "simulated": ", ".join(report.simulated)}
        for name, value in facts.items():
            ET.SubElement(properties, "property", name=name, value=printable(str(value)))
        for result in found:
            _junit_case(suite, result)
    ET.indent(root)
    ET.ElementTree(root).write(path, encoding="utf-8", xml_declaration=True)


def _totals(results: list[Result]) -> dict[str, str]:
    counts = Counter(r.status for r in results)
    skipped = counts["gap"] + counts["unavailable"]
    time = f"{sum(r.seconds for r in results):.3f}"
    return {"tests": str(len(results)), "failures": str(counts["fail"]), "errors": "0", "skipped": str(skipped), "time": time}


def _junit_case(suite: ET.Element, result: Result) -> None:
    name, classname = f"{result.case.id}[{result.check}]", f"m3_hw.{result.case.op}"
    case = ET.SubElement(suite, "testcase", name=printable(name), classname=printable(classname), time=f"{result.seconds:.3f}")
    message = printable(result.message)
    if result.status == "fail":
        failure = ET.SubElement(case, "failure", type=result.check, message=message)
        numbers = json.dumps({"metrics": result.metrics, "tolerance": result.tolerance}, indent=1)
        failure.text = f"{message}\n{printable(numbers)}"
    elif result.status != "pass":
        ET.SubElement(case, "skipped", type=result.status, message=f"{result.status}: {message}")


def save_html(report: Report, path: Path) -> None:
    """Write one self-contained page: no network, no other file, the numbers inside as JSON.

    Args:
        report: What a run found.
        path: File to write.
    """
    template = (files("m3_hw.parity") / "report.html").read_text(encoding="utf-8")
    data = json.dumps(_finite(_page(report)), allow_nan=False).replace("<", "\\u003c")  # nothing can close the script element
    before, after = template.split("{{data}}")
    path.write_text(before + data + after, encoding="utf-8")


def _page(report: Report) -> dict[str, Any]:
    head = {key: getattr(report, key) for key in ("tier", "seed", "created", "command", "environment", "simulated", "format")}
    return {**head, "summary": report.summary, "passed": report.passed, "rows": [_page_row(row) for row in rows(report)]}


def _page_row(row: Row) -> dict[str, Any]:
    worst = None
    if row.worst is not None:
        result, found = row.worst
        worst = {
            **found._asdict(),
            "used": found.used,
            "sample": result.case.sample,
            "reason": result.tolerance[found.output].get("reason", ""),
        }
    shares = {ulps: min(row.numbers("within_ulp", ulps), default=None) for ulps in ("1", "2", "16")}
    return {
        "op": row.op,
        "backend": row.backend,
        "dtype": SHORT.get(row.dtype, row.dtype),
        "simulated": row.simulated,
        "verdict": row.verdict,
        "label": row.label,
        "counts": dict(row.counts),
        "cases": row.cases,
        "checks": row.checks,
        "worst": worst,
        "rel_l2": row.largest("rel_l2"),
        "calc_diff": row.largest("calc_diff"),
        "worst_row": row.largest("worst_row", "rel_l2"),
        "ulp": row.largest("max_ulp", "ulp"),
        "within": shares,
        "mixed": row.ascend_mixed,
        "near_ties": row.near_ties,
        "unmeasured": row.unmeasured,
        "results": [_page_result(r) for r in sorted(row.results, key=lambda r: (WORST_FIRST.index(r.status), r.case, r.check))],
    }


def _page_result(result: Result) -> dict[str, Any]:
    found = deciding(result)
    return {
        "id": result.case.id,
        "sample": result.case.sample,
        "tier": result.case.tier,
        **{key: getattr(result, key) for key in ("check", "status", "message", "note", "seconds", "cases", "metrics", "tolerance")},
        "deciding": found and str(found),
    }


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinities: they travel as strings that JavaScript's Number() reads."""
    if isinstance(value, dict):
        return {str(k): _finite(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(v) for v in value]
    if isinstance(value, float) and not math.isfinite(value):
        return "NaN" if math.isnan(value) else "Infinity" if value > 0 else "-Infinity"
    return value

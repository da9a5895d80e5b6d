"""What people read of a benchmark: a terminal table, a Markdown table and a picture."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from m3_hw.bench.run import Bench, Line

BUSY = 0.2
"""Cores that other processes may use before a line is called disturbed."""

HEAD = ("line", "dtype", "time", "rate", "of the ceiling", "baseline", "ratio", "memory", "target")
SHORT = {"bfloat16": "bf16", "float32": "fp32", "float16": "fp16"}


def rows(bench: Bench) -> Iterator[tuple[str, ...]]:
    """The table's rows, as text."""
    several = len({line.backend for line in bench.lines}) > 1
    for line in bench.lines:
        name = f"{line.backend}: {line.name}" if several else line.name
        dtype = SHORT.get(line.dtype, line.dtype)
        if line.error:
            yield (name, dtype, line.error, *[""] * 6)
            continue
        memory = "" if line.peak_memory is None else _bytes(line.peak_memory)
        baseline = "" if line.baseline_seconds is None else f"{line.baseline} {_seconds(line.baseline_seconds)}"
        ratio = "" if line.ratio is None else f"{line.ratio:.2f}x"
        yield name, dtype, _seconds(line.seconds), _rate(line), _share(line), baseline, ratio, memory, "; ".join(map(_target, line.targets))


def markdown(bench: Bench) -> str:
    """The run as a Markdown section: where, when and how it was made, the ceilings, the table, the notes."""
    versions = bench.environment["versions"]
    stack = ", ".join(f"{name} {versions[name]}" for name in ("python", "torch", "triton", "torch-npu") if versions.get(name))
    lines = [f"{bench.device} · {stack} · {bench.created} · {bench.seconds:.0f} s", "", f"`{bench.command}`", ""]
    lines += [f"Ceilings measured in the same run: {_ceilings(bench)}.", ""]
    lines += [_markdown_row(HEAD), _markdown_row(["---"] * len(HEAD)), *map(_markdown_row, rows(bench))]
    notes = dict.fromkeys(f"- {line.name}: {line.note}" for line in bench.lines if line.note)
    return "\n".join([*lines, "", *_disturbed(bench), *notes]).rstrip() + "\n"


def _disturbed(bench: Bench) -> list[str]:
    """A warning, where other processes took cores from what was measured."""
    found = [line for line in bench.lines if line.other_cores > BUSY]
    if not found:
        return []
    most = max(line.other_cores for line in found)
    where = f"{len(found)} of {len(bench.lines)} lines"
    return [f"**Other processes used up to {most:.1f} cores during {where}: measure again on a quiet machine.**", ""]


def terminal_table(bench: Bench) -> Any:
    """The run as a rich table of what fits a terminal; what couldn't run below it."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    columns = [HEAD.index(name) for name in ("line", "dtype", "time", "of the ceiling", "ratio", "target")]
    table = Table(*(HEAD[i] for i in columns), title=f"{bench.device} · {_ceilings(bench)}", pad_edge=False)
    ran = [row for row, line in zip(rows(bench), bench.lines, strict=True) if not line.error]
    for row in ran:
        table.add_row(*(Text(row[i]) for i in columns))
    failed = dict.fromkeys(f"{line.name}: {line.error}" for line in bench.lines if line.error)
    return Group(table, *map(Text, [*failed, *(text.strip("*") for text in _disturbed(bench))]))


def plot(bench: Bench, path: Path) -> None:
    """Draw the lines as bars: left the share of the ceiling, right the speed over the baseline, with its targets."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    shown = [line for line in bench.lines if line.ratio is not None and line.share is not None][::-1]
    with mpl.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure = Figure(figsize=(13, 1.6 + 0.24 * max(len(shown), 1)), layout="constrained")
        left, right = figure.subplots(1, 2, sharey=True)
        left.set_yticks(range(len(shown)), [f"{line.name} · {SHORT.get(line.dtype, line.dtype)}" for line in shown])
        for place, line in enumerate(shown):
            _draw_share(left, place, line)
            _draw_ratio(right, place, line)
        left.set_xlabel("% of the ceiling (blue: copy bandwidth, orange: matrix products)")
        left.set_xlim(0, 1.35 * max((100 * (line.share or 0) for line in shown), default=1))
        right.set_xlabel("times as fast as the torch formulation (diamond: target)")
        right.set_xscale("log")
        right.set_xlim(0.7 * min((line.ratio or 1 for line in shown), default=1), 1.6 * max((line.ratio or 1 for line in shown), default=2))
        right.axvline(1, color="black", linewidth=0.8)
        right.xaxis.set_major_locator(mpl.ticker.LogLocator(subs=(1, 2, 5)))
        right.xaxis.set_major_formatter(lambda value, _: f"{value:g}x")
        right.xaxis.set_minor_locator(mpl.ticker.NullLocator())
        left.margins(y=0.01)
        figure.suptitle(f"m3-hw bench · {bench.device} · {bench.created[:10]}")
        figure.savefig(path, dpi=130, format="png")


def _draw_share(axis: Any, place: int, line: Line) -> None:
    share = 100 * (line.share or 0)
    axis.barh(place, share, color="#3b6ea5" if line.bound == "copy" else "#c2703d")
    axis.text(share, place, f" {share:.0f} % · {_seconds(line.seconds)}", va="center", fontsize=8)


def _draw_ratio(axis: Any, place: int, line: Line) -> None:
    """A bar from 1, to the right where the operator is faster."""
    ratio = line.ratio or 1.0
    axis.barh(place, ratio - 1, left=1, color="#4c9a6a" if ratio >= 1 else "#b5565a")
    axis.text(max(ratio, 1), place, f" {ratio:.2f}x", va="center", fontsize=8)
    for target in line.targets:
        if target["metric"] == "ratio":
            axis.plot([target["limit"]], [place], marker="D", markersize=4, color="black", markeredgecolor="white")


def _markdown_row(cells: Any) -> str:
    return "| " + " | ".join(str(cell).replace("|", r"\|") for cell in cells) + " |"


def _ceilings(bench: Bench) -> str:
    parts = []
    for device, ceiling in bench.ceilings.items():
        products = ", ".join(f"{SHORT.get(dtype, dtype)} {_flops(value)}" for dtype, value in ceiling["matmul"].items())
        parts.append(f"{device} copy {ceiling['copy'] / 1e9:.3g} GB/s, matrix products {products}")
    return "; ".join(parts)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    for factor, unit in ((1, "s"), (1e3, "ms")):
        if value * factor >= 1:
            return f"{value * factor:.3g} {unit}"
    return f"{value * 1e6:.3g} µs"


def _bytes(value: float) -> str:
    return f"{value / 2**30:.2f} GiB" if value >= 2**30 else f"{value / 2**20:.0f} MiB"


def _flops(value: float) -> str:
    return f"{value / 1e12:.3g} TFLOP/s" if value >= 1e12 else f"{value / 1e9:.3g} GFLOP/s"


def _rate(line: Line) -> str:
    """What bounds the line, a second."""
    if line.seconds is None or line.bytes is None or line.operations is None:
        return ""
    return f"{line.bytes / line.seconds / 1e9:.3g} GB/s" if line.bound == "copy" else _flops(line.operations / line.seconds)


def _share(line: Line) -> str:
    return "" if line.share is None else f"{100 * line.share:.0f} % {line.bound}"


def _target(target: dict[str, Any]) -> str:
    limit = target["limit"]
    text = {"ratio": f"{limit:.3g}x", "peak_memory": _bytes(limit), "seconds": _seconds(limit)}[target["metric"]]
    return f"{'>=' if target['at_least'] else '<='} {text}: {'met' if target['met'] else 'missed'}"

"""`m3-hw bench`: how fast the operators are."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3_hw.cli.common import command, names, one_or_more, ready, show_table

if TYPE_CHECKING:
    from m3_hw.bench.run import Line


def bench(
    op: Annotated[list[str] | None, one_or_more("Operators, or dispatch", "--op")] = None,
    backend: Annotated[list[str] | None, one_or_more("Backends", "--backend")] = None,
    workload: Annotated[list[str] | None, one_or_more("Workloads, by a part of their name", "--workload")] = None,
    dtype: Annotated[list[str] | None, one_or_more("Data types, such as bfloat16", "--dtype")] = None,
    json: Annotated[Path | None, typer.Option("--json", help="Write every number as JSON.")] = None,
    plot: Annotated[Path | None, typer.Option("--plot", help="Draw the lines into a PNG.")] = None,
    markdown: Annotated[Path | None, typer.Option("--markdown", help="Write the table as Markdown.")] = None,
    from_json: Annotated[Path | None, typer.Option("--from", help="Measure nothing: show what --json wrote.")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Tiny shapes: checks that the benchmark works.")] = False,
    list_lines: Annotated[bool, typer.Option("--list", help="List the lines and measure nothing.")] = False,
) -> None:
    """Measure the operators against the machine's ceilings and against torch."""
    from m3_hw.bench import report
    from m3_hw.bench.run import Bench, Choice, line_names, run

    choice = Choice(names(op), names(backend), names(workload), names(dtype), quick)
    if list_lines:
        typer.echo("\n".join(line_names(choice)))
        return
    found = Bench.load(from_json) if from_json else run(choice, command=command(), progress=_show)
    if json:
        found.save(ready(json))
    if plot:
        report.plot(found, ready(plot))
    if markdown:
        ready(markdown).write_text(report.markdown(found), encoding="utf-8")
    show_table(report.terminal_table(found))


def _show(line: "Line", done: int, total: int) -> None:
    ratio = f", {line.ratio:.2f}x as fast as {line.baseline}" if line.ratio else ""
    what = line.error or f"{(line.seconds or 0) * 1e3:.3g} ms{ratio}"
    typer.echo(f"{done}/{total} {line.backend}: {line.name}, {line.dtype}: {what}", err=True)

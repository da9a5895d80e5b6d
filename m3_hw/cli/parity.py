"""`m3-hw parity`: does a backend compute what the reference computes?"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from m3_hw.cli.common import command, names, one_or_more, ready, show_table
from m3_hw.errors import ContractError, M3HWError

if TYPE_CHECKING:
    from m3_hw.parity.results import Case, Report, Result
    from m3_hw.parity.run import Options

app = typer.Typer(invoke_without_command=True, help="Compare backends with the reference, here or through recordings.")

CERTIFY = "certify"
"""The tier of drawn cases, beside the tiers of written samples."""

Ops = Annotated[list[str] | None, one_or_more("Operators", "--op")]
Dtypes = Annotated[list[str] | None, one_or_more("Data types, such as bfloat16", "--dtype")]
Tiers = Annotated[list[str] | None, one_or_more("small (the default), model, stress; or certify", "--tier")]
Samples = Annotated[list[str] | None, one_or_more("Samples, by name", "--sample")]
Seed = Annotated[int, typer.Option("--seed", help="Seed of the drawn data.")]
Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page.")]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML.")]
Json = Annotated[Path | None, typer.Option("--json", help="Write the whole report as JSON.")]
Markdown = Annotated[Path | None, typer.Option("--markdown", help="Write the table; into its markers if the file exists.")]


@app.callback()
def parity(
    ctx: typer.Context,
    op: Ops = None,
    backend: Annotated[list[str] | None, one_or_more("Backends", "--backend")] = None,
    tier: Tiers = None,
    dtype: Dtypes = None,
    sample: Samples = None,
    check: Annotated[list[str] | None, one_or_more("Checks, by name", "--check")] = None,
    seed: Seed = 0,
    cases: Annotated[
        int | None, typer.Option("--cases", min=1, help="Drawn cases per operator and backend; 1000 with --tier certify.")
    ] = None,
    state: Annotated[Path | None, typer.Option("--state", help="File that lets a stopped certify run go on.")] = None,
    html: Html = None,
    junit: Junit = None,
    json: Json = None,
    markdown: Markdown = None,
    list_cases: Annotated[bool, typer.Option("--list", help="List the cases and run nothing.")] = False,
) -> None:
    """Run every check on every case that is asked for; without options, all backends on the small tier."""
    if ctx.invoked_subcommand is not None:
        return
    from m3_hw.parity.certify import certify
    from m3_hw.parity.run import run

    options = _options(op, backend, tier, dtype, sample, check, seed)
    certifies = CERTIFY in options.tiers
    if not certifies and (cases is not None or state is not None):
        raise typer.BadParameter(f"--cases and --state go with --tier {CERTIFY}")
    if certifies and (sample or check or list_cases):
        raise typer.BadParameter(f"--sample, --check and --list don't go with --tier {CERTIFY}, which draws its cases")
    if list_cases:
        for case in _cases(options):
            typer.echo(case.id)
        return
    with _progress() as progress:
        if certifies:
            report = certify(options, cases=cases or 1000, state=state and ready(state), command=command(), progress=progress)
        else:
            report = run(options, command=command(), progress=progress)
    _finish(report, html, junit, json, markdown)


@app.command("record")
def record(
    backend: Annotated[str, typer.Option("--backend", help="Backend that runs the cases.")],
    output: Annotated[Path, typer.Option("--output", "-o", help="File to write, such as cuda.m3p.")],
    op: Ops = None,
    tier: Annotated[list[str] | None, one_or_more("small (the default), model, stress", "--tier")] = None,
    dtype: Dtypes = None,
    sample: Samples = None,
    seed: Seed = 0,
) -> None:
    """Run cases on this machine and write what its backend gave, to be judged elsewhere."""
    from m3_hw.parity import bundle

    options = _options(op, [backend], tier, dtype, sample, seed=seed)
    if CERTIFY in options.tiers:
        raise typer.BadParameter(f"--tier {CERTIFY} can't be recorded: its cases are drawn anew")
    with _progress() as progress:
        bundle.record(options, backend, ready(output), progress=progress)
    typer.echo(f"wrote {output}")


Recording = Annotated[Path, typer.Argument(help="What `m3-hw parity record` wrote.")]


@app.command("compare")
def compare(a: Recording, b: Recording, html: Html = None, junit: Junit = None, json: Json = None, markdown: Markdown = None) -> None:
    """Judge recording B against recording A; needs neither backend."""
    from m3_hw.parity import bundle

    with _progress() as progress:
        report = bundle.compare(bundle.load(a), bundle.load(b), command=command(), progress=progress)
    _finish(report, html, junit, json, markdown)


@app.command("check")
def check_recording(
    a: Recording,
    backend: Annotated[str, typer.Option("--backend", help="Backend that runs the cases here.")],
    html: Html = None,
    junit: Junit = None,
    json: Json = None,
    markdown: Markdown = None,
) -> None:
    """Run the cases of recording A on a backend of this machine, and judge them against it."""
    from m3_hw.parity import bundle
    from m3_hw.parity.cases import accepted, known

    accepted("backend", [backend], known())
    with _progress() as progress:
        report = bundle.check(bundle.load(a), backend, command=command(), progress=progress)
    _finish(report, html, junit, json, markdown)


def _options(
    op: list[str] | None,
    backend: list[str] | None,
    tier: list[str] | None,
    dtype: list[str] | None,
    sample: list[str] | None,
    check: list[str] | None = None,
    seed: int = 0,
) -> "Options":
    """The options, every name in them known, and at least one case behind them."""
    from m3_hw.parity.cases import TIERS, accepted
    from m3_hw.parity.report import SHORT
    from m3_hw.parity.run import Options

    full = {short: name for name, short in SHORT.items()}
    dtypes = tuple(full.get(name, name) for name in names(dtype) or ()) or None
    tiers = tuple(accepted("tier", names(tier) or ("small",), (*TIERS, CERTIFY)))
    if CERTIFY in tiers and len(tiers) > 1:
        raise ContractError(f"tier has {', '.join(tiers)}; accepted: {CERTIFY} alone, or any of {', '.join(TIERS)}")
    options = Options(names(op), names(backend), dtypes, names(sample), tiers, names(check), seed)
    _cases(options)
    return options


def _cases(options: "Options") -> list["Case"]:
    """The cases that the options choose; of a certify run, those that its operators, backends and dtypes are in."""
    from dataclasses import replace

    found = (replace(options, tiers=("small",)) if CERTIFY in options.tiers else options).cases()
    if not found:
        raise M3HWError("no case has what is asked for; `m3-hw parity --list` lists them")
    return found


@contextmanager
def _progress() -> Iterator[Callable[["Result", int, int], None]]:
    """Shows how far a run is: a bar on a terminal, elsewhere a plain line every 5 %."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True)
    if not console.is_terminal:
        yield _PlainProgress()
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task("", total=None)

        def show(result: "Result", done: int, total: int) -> None:
            bar.update(task, completed=done, total=total, description=f"{result.case.id} {result.check}")

        yield show


class _PlainProgress:
    """Prints a line whenever another 5 % of the cases are done."""

    def __init__(self) -> None:
        self._printed = 0

    def __call__(self, result: "Result", done: int, total: int) -> None:
        if done == 1:
            self._printed = 0  # another pass begins
        if done * 20 // total > self._printed:
            self._printed = done * 20 // total
            typer.echo(f"{done}/{total} {result.case.id}", err=True)


def _finish(report: "Report", html: Path | None, junit: Path | None, json: Path | None, markdown: Path | None) -> None:
    """Print the report, write its files, and exit with 1 if it did not pass."""
    from m3_hw.parity import report as reports

    if html:
        reports.save_html(report, ready(html))
    if junit:
        reports.save_junit(report, ready(junit))
    if json:
        report.save(ready(json))
    if markdown and markdown.exists():
        reports.update_markdown(markdown, report)
    elif markdown:
        ready(markdown).write_text(f"<!-- parity-table -->\n{reports.markdown_table(report)}\n<!-- /parity-table -->\n", encoding="utf-8")
    show_table(reports.terminal_table(report))
    if not report.passed:
        raise typer.Exit(1)

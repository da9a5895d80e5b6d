"""`m3-hw ops`: the catalogue of operators, and docs/operators.md."""

from typing import Annotated

import typer

from m3_hw.cli.common import names, one_or_more


def ops(
    op: Annotated[list[str] | None, one_or_more("Operators", "--op")] = None,
    markdown: Annotated[bool, typer.Option("--markdown", help="Print docs/operators.md.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """List the operators: signature, backends, dtypes."""
    from m3_hw import catalogue
    from m3_hw.cli.common import print_json

    if markdown and as_json:
        raise typer.BadParameter("--markdown and --json exclude each other")
    entries = catalogue.catalogue(names(op))
    if markdown:
        typer.echo(catalogue.markdown(entries), nl=False)
    elif as_json:
        print_json([entry.as_json() for entry in entries])
    else:
        for entry in entries:
            typer.echo(f"{entry.signature}\n    {entry.doc.summary}")
            typer.echo(f"    dtypes {', '.join(entry.dtypes)}; backends {', '.join(entry.backends) or 'none'}\n")

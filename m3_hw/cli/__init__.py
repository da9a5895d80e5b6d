"""`m3-hw`: doctor, ops, parity and bench on the command line.

Exit status: 0 all is well; 1 parity failed; 2 bad usage, or input that can't be used.
"""

from typing import Any

import typer
from rich.console import Console
from rich.markup import escape
from typer.core import TyperGroup

from m3_hw.cli import bench, doctor, ops, parity
from m3_hw.errors import M3HWError


class _Group(TyperGroup):
    """Says an error that m3_hw raises on purpose, or a file that can't be used, in one line instead of a traceback."""

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except M3HWError as error:
            reason = str(error)
        except OSError as error:
            if error.filename is None:
                raise
            reason = f"{error.filename}: {error.strerror}"
        Console(stderr=True, soft_wrap=True, highlight=False).print(f"[bold red]{escape(f'm3-hw: {reason}')}[/]")
        raise typer.Exit(2)


app = typer.Typer(
    name="m3-hw",
    cls=_Group,
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
    help="MiniMax-M3's operators on this machine: what runs, whether it is right, how fast it is.",
)
app.command("doctor")(doctor.doctor)
app.command("ops")(ops.ops)
app.add_typer(parity.app, name="parity")
app.command("bench")(bench.bench)


def main() -> None:
    """Entry point of the console script."""
    app()

"""What the commands share: lists as options, and files to write."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import RenderableType


def names(values: Sequence[str] | None) -> tuple[str, ...] | None:
    """What an option that may repeat, and may hold commas, was given; None if it was not."""
    found = [name.strip() for value in values or () for name in value.split(",") if name.strip()]
    return tuple(dict.fromkeys(found)) or None


def one_or_more(what: str, flag: str) -> Any:
    """An option that may repeat or hold commas."""
    return typer.Option(flag, help=f"{what}; may repeat or hold commas.", show_default=False)


def print_json(data: Any) -> None:
    """Print plain JSON, whatever the width of the terminal."""
    typer.echo(json.dumps(data, indent=1))


def show_table(table: "RenderableType") -> None:
    """Print a table as wide as the terminal, and wide enough for one line a row where there is none (a file, CI)."""
    from rich.console import Console

    console = Console()
    if not console.is_terminal:
        console.width = 160
    console.print(table)


def ready(path: Path) -> Path:
    """The path, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def command() -> str:
    """This command line, as a report quotes it."""
    return shlex.join(["m3-hw", *sys.argv[1:]])

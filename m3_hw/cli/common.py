"""What the commands share: lists as options, and files to write."""

import json
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import typer


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


def ready(path: Path) -> Path:
    """The path, its folder made."""
    path.parent.mkdir(parents=True, exist_ok=True)
    return path


def command() -> str:
    """This command line, as a report quotes it."""
    return shlex.join(["m3-hw", *sys.argv[1:]])

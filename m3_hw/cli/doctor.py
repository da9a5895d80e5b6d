"""`m3-hw doctor`: what this machine has, and what runs on it."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer


def doctor(as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False) -> None:
    """Show versions, devices and settings, and per operator and backend: available, simulated, or why not."""
    from m3_hw.cli.common import print_json

    facts = diagnose()
    if as_json:
        print_json(facts)
    else:
        _print(facts)


def diagnose() -> dict[str, Any]:
    """Environment, backends and operators of this process, as plain JSON data."""
    from dataclasses import asdict

    from m3_hw import capabilities
    from m3_hw.environment import environment

    operators = [asdict(capability) for capability in capabilities()]
    return {"environment": environment(), "asked_for": _asked_for(), "backends": _backends(), "operators": operators}


def _asked_for() -> str:
    """The backend that calls ask for, and by what; or what is wrong with it."""
    from m3_hw.dispatch import requested_backend
    from m3_hw.errors import BackendUnavailableError

    try:
        asked = requested_backend()
    except BackendUnavailableError as error:
        return f"every call fails: {error}"
    return f"{asked.backend}, by {asked.reason}"


def _backends() -> dict[str, Any]:
    """Each backend's versions, and why it can't be used: an empty list if it can."""
    from m3_hw.dispatch import backends
    from m3_hw.errors import PROBE_ERRORS, BackendUnavailableError

    found: dict[str, Any] = {}
    for name, backend in backends().items():
        try:
            found[name] = {"versions": backend.versions(), "reasons": backend.unavailable_reasons()}
        except (BackendUnavailableError, *PROBE_ERRORS) as error:
            found[name] = {"versions": {}, "reasons": [f"{type(error).__name__}: {error}"]}
    return found


def _print(facts: dict[str, Any]) -> None:
    from rich.console import Console
    from rich.markup import escape

    console = Console(highlight=False, soft_wrap=True)
    for section, values in facts["environment"].items():
        console.print(f"[bold]{section}[/]")
        for name, value in _flat(values):
            console.print(f"  {name:<42} {escape(value)}")
    console.print(f"[bold]backend asked for[/]\n  {escape(facts['asked_for'])}\n[bold]backends[/]")
    for name, backend in facts["backends"].items():
        state = "; ".join(backend["reasons"]) or "available"
        stack = ", ".join(f"{package} {version}" for package, version in backend["versions"].items())
        console.print(f"  {name:<10} {escape(state)}{escape(f' ({stack})') if stack else ''}")
    _print_operators(console, facts["operators"])


def _flat(values: Any, prefix: str = "") -> Iterator[tuple[str, str]]:
    """Names and values of nested data, a line each."""
    if isinstance(values, dict):
        if not values:
            yield prefix.rstrip("."), "none set"
        for name, value in values.items():
            yield from _flat(value, f"{prefix}{name}.")
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        for i, value in enumerate(values):
            yield prefix.rstrip(".") + f"[{i}]", ", ".join(f"{k} {v}" for k, v in value.items())
    elif isinstance(values, list):
        yield prefix.rstrip("."), " ".join(map(str, values)) or "none"
    else:
        yield (
            prefix.rstrip("."),
            "none" if values is None else str(values),
        )


STYLES = {"available": "green", "simulated": "yellow", "unavailable": "red", "missing": "dim"}


def _print_operators(console: Any, capabilities: list[dict[str, Any]]) -> None:
    """A table of operators by backends; the reasons below it, each said once."""
    from rich.table import Table

    columns = list(dict.fromkeys(row["backend"] for row in capabilities))
    status = {(row["op"], row["backend"]): row["status"] for row in capabilities}
    table = Table("operator", *columns, title="operators", title_justify="left", title_style="bold")
    for op in dict.fromkeys(row["op"] for row in capabilities):
        table.add_row(op, *(f"[{STYLES[status[op, name]]}]{status[op, name]}[/]" for name in columns))
    console.print(table)
    why: dict[tuple[str, str], list[str]] = {}
    for row in capabilities:
        if row["reasons"]:
            why.setdefault((row["backend"], "; ".join(row["reasons"])), []).append(row["op"])
    total = len(table.rows)
    for (backend, reason), ops in why.items():
        which = "every operator" if len(ops) == total else ", ".join(ops)
        console.print(f"{backend}, {which}: {reason}", markup=False)

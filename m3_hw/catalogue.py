"""The catalogue of operators, made of the specs alone: what `m3-hw ops` prints and docs/operators.md holds."""

import inspect
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from m3_hw.backend import BUILT_IN
from m3_hw.contract import FLOATS
from m3_hw.dispatch import backends, specs
from m3_hw.errors import ContractError
from m3_hw.spec import OpSpec, Sample, Tolerance

SECTIONS = ("Args", "Returns", "Raises", "Numerics", "Source")
"""What a reference's docstring says after its formula, in this order."""


@dataclass(frozen=True)
class Doc:
    """A reference's docstring in parts: the summary, the formula, prose in between, and the sections."""

    summary: str
    formula: str
    notes: str
    args: tuple[tuple[str, str], ...]  # names, what they are
    sections: dict[str, str]


@dataclass(frozen=True)
class Entry:
    """One operator of the catalogue."""

    spec: OpSpec[..., Any]
    doc: Doc

    @property
    def signature(self) -> str:
        """The operator's call, a parameter a line when it is long."""
        signature = inspect.signature(self.spec.reference)
        parameters = [_parameter(p) for p in signature.parameters.values()]
        for i, p in enumerate(signature.parameters.values()):
            if p.kind is p.KEYWORD_ONLY:
                parameters.insert(i, "*")
                break
        returns = f" -> {_annotation(signature.return_annotation)}"
        line = f"{self.spec.name}({', '.join(parameters)}){returns}"
        return line if len(line) <= 100 else f"{self.spec.name}(\n" + "".join(f"    {p},\n" for p in parameters) + f"){returns}"

    @property
    def dtypes(self) -> list[str]:
        """Data types under test."""
        return [_dtype(dtype) for dtype in self.spec.dtypes]

    @property
    def backends(self) -> list[str]:
        """Built-in backends that have the operator, whether or not they can run here."""
        return [name for name in BUILT_IN if backends()[name].has(self.spec.name)]

    def as_json(self) -> dict[str, Any]:
        """Plain JSON data."""
        tolerances = {
            output: {_dtype(dtype): asdict(tolerance) for dtype, tolerance in by_dtype.items()}
            for output, by_dtype in self.spec.tolerances.items()
        }
        samples = [{"name": s.name, "tier": s.tier, "dtypes": _sample_dtypes(s), "note": s.note} for s in self.spec.samples]
        facts = {"op": self.spec.name, "signature": self.signature, **asdict(self.doc), "dtypes": self.dtypes, "backends": self.backends}
        return {**facts, "mutates": list(self.spec.mutates), "tolerances": tolerances, "samples": samples}


def catalogue(ops: Sequence[str] | None = None) -> list[Entry]:
    """The named operators, or all of them, sorted.

    Raises:
        ContractError: An unknown operator; lists the known ones.
    """
    known = specs()
    for op in ops or ():
        if op not in known:
            raise ContractError(f"op has {op!r}; accepted: {', '.join(sorted(known))}")
    return [Entry(known[op], parse(known[op].reference.__doc__ or "")) for op in sorted(ops or known)]


def parse(docstring: str) -> Doc:
    """Take a reference's docstring apart."""
    body, *rest = re.split(rf"^({'|'.join(SECTIONS)}):[ ]?", inspect.cleandoc(docstring), flags=re.MULTILINE)
    sections = dict(zip(rest[::2], rest[1::2], strict=True))
    summary, *paragraphs = (p.strip() for p in body.strip().split("\n\n"))
    formula, *notes = paragraphs or [""]
    args = tuple(_items(sections.pop("Args", "")))
    flowed = {name: _returns(text) if name == "Returns" else _flow(text) for name, text in sections.items()}
    return Doc(summary, formula, "\n\n".join(map(_flow, notes)), args, flowed)


def _items(section: str) -> list[tuple[str, str]]:
    """`names: text` entries of an indented section; deeper lines continue the entry above."""
    entries = re.split(r"\n(?=\S)", inspect.cleandoc(section))
    return [(name.strip(), _flow(text)) for name, _, text in (entry.partition(":") for entry in entries) if name.strip()]


def _flow(text: str) -> str:
    """The text in one line."""
    return " ".join(text.split())


def _returns(section: str) -> str:
    """One line, or one for each output where they are listed by name."""
    entries = re.split(r"\n(?=\w+(?:, \w+)*: )", inspect.cleandoc(section))
    return "\n".join(map(_flow, entries))


def _annotation(annotation: Any) -> str:
    return inspect.formatannotation(annotation).replace("torch.Tensor", "Tensor")


def _parameter(parameter: inspect.Parameter) -> str:
    text = f"{parameter.name}: {_annotation(parameter.annotation)}"
    return text if parameter.default is parameter.empty else f"{text} = {parameter.default!r}"


def _dtype(dtype: Any) -> str:
    return str(dtype).removeprefix("torch.")


def _sample_dtypes(sample: Sample) -> list[str] | None:
    return None if sample.dtypes is None else [_dtype(dtype) for dtype in sample.dtypes]


def markdown(entries: Sequence[Entry]) -> str:
    """The entries as a page. Holds nothing of this machine, so that it can be compared with what is committed."""
    overview = _table(
        ("operator", "", *BUILT_IN),
        [
            (f"[`{e.spec.name}`](#{e.spec.name})", e.doc.summary, *("yes" if name in e.backends else "-" for name in BUILT_IN))
            for e in entries
        ],
    )
    head = (
        "# Operators\n\n"
        "Made by `m3-hw ops --markdown` from the specs in `m3_hw/ops`; don't edit. T counts query tokens of the packed batch, B "
        "sequences, N pages, P = 128 keys of a page, H hidden channels, D channels of a head, E experts, A experts of a token, "
        "K selected blocks.\n\n"
        f"{overview.rstrip()}"
    )
    return "\n\n".join([head, *(_section(entry) for entry in entries)]) + "\n"


def _section(entry: Entry) -> str:
    spec, doc = entry.spec, entry.doc
    parts = [f"## {spec.name}", _plain(doc.summary), f"```python\n{entry.signature}\n```", f"```\n{doc.formula}\n```"]
    if doc.notes:
        parts.append(_plain(doc.notes))
    parts.append(
        _table(("argument", ""), [(", ".join(f"`{n.strip()}`" for n in name.split(",")), text) for name, text in doc.args]).rstrip()
    )
    parts += [f"**{name}.**{_as_list(text)}" for name, text in doc.sections.items()]
    if spec.mutates:
        parts.append(f"**Writes to** {', '.join(f'`{name}`' for name in spec.mutates)}.")
    parts.append(f"**Data types under test.** {', '.join(entry.dtypes)}.")
    parts.append("**Limits** against the golden result in fp64.")
    parts.append(_table(("output", "dtypes", "rule", "why"), _limits(spec)).rstrip())
    parts.append("**Samples.**")
    parts.append(_table(("tier", "samples"), _samples(spec)).rstrip())
    return "\n\n".join(parts)


def _as_list(text: str) -> str:
    """Entries of several lines as a list."""
    return f" {_plain(text)}" if "\n" not in text else "\n\n" + "\n".join(f"- {_plain(line)}" for line in text.splitlines())


def _plain(text: str) -> str:
    """Text whose stars, outside code, are no emphasis: 2*I."""
    return "`".join(part if i % 2 else part.replace("*", r"\*") for i, part in enumerate(text.split("`")))


def _limits(spec: OpSpec[..., Any]) -> list[tuple[str, ...]]:
    """One row for each limit of an output, with every dtype that it holds for."""
    rows: list[tuple[str, ...]] = []
    for output, by_dtype in spec.tolerances.items():
        grouped: dict[Tolerance, list[str]] = {}
        for dtype, tolerance in by_dtype.items():
            if dtype in (*spec.dtypes, *FLOATS):
                grouped.setdefault(tolerance, []).append(_dtype(dtype))
        rows += [(f"`{output}`", ", ".join(dtypes), _rule(t), t.reason) for t, dtypes in grouped.items()]
    return rows


def _rule(tolerance: Tolerance) -> str:
    limits = {name: getattr(tolerance, name) for name in ("limit", "worst_row", "floor", "margin")}
    return ", ".join([tolerance.rule, *(f"{name} {value:.3g}" for name, value in limits.items() if value)])


def _samples(spec: OpSpec[..., Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for tier in ("small", "model", "stress"):
        found = [f"{s.name} ({s.note})" if s.note else s.name for s in spec.samples if s.tier == tier]
        if found:
            rows.append((tier, ", ".join(found)))
    return rows


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join("| " + " | ".join(_plain(" ".join(cell.split())).replace("|", r"\|") for cell in line) + " |\n" for line in lines)

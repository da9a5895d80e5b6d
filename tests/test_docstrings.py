"""Names and words: operator = file = function = torch op; docstrings say what they must; gaps are listed."""

import importlib
import inspect
import pkgutil
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import m3_hw
import m3_hw.ops
from m3_hw.backend import BUILT_IN, Backend
from m3_hw.dispatch import backends, specs

OPERATORS = sorted(specs())
ROOT = Path(__file__).resolve().parent.parent
SECTIONS = ("Args", "Returns", "Raises", "Numerics", "Source")
NOT_RAISED_ON = {"capabilities"}  # takes nothing, refuses nothing


def public_functions() -> dict[str, Callable[..., Any]]:
    """Functions of `m3_hw.__all__` that are not operators."""
    found = {name: getattr(m3_hw, name) for name in m3_hw.__all__ if name not in specs()}
    return {name: value for name, value in found.items() if inspect.isfunction(value)}


def sections(doc: str) -> dict[str, str]:
    """Text of each section of a docstring, in order."""
    parts = re.split(rf"^({'|'.join(SECTIONS)}):", inspect.cleandoc(doc), flags=re.MULTILINE)
    return dict(zip(parts[1::2], (text.strip() for text in parts[2::2]), strict=True))


def described(arguments: str) -> Iterator[str]:
    """Names that an Args section describes; one entry may name several."""
    for names in re.findall(r"^ *((?:\*{0,2}\w+(?:, )?)+):", inspect.cleandoc("\n" + arguments), flags=re.MULTILINE):
        yield from (name.lstrip("*") for name in names.split(", "))


def test_there_are_18_operators() -> None:
    assert len(OPERATORS) == 18


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_file_function_and_torch_op_share_a_name(op: str) -> None:
    module = importlib.import_module(f"m3_hw.ops.{op}")
    assert module.SPEC is specs()[op]
    assert getattr(module, op) is specs()[op].reference
    assert op in m3_hw.__all__
    assert getattr(m3_hw, op).__name__ == op
    assert getattr(torch.ops.m3_hw, op).default._schema.name == f"m3_hw::{op}"


def test_every_file_of_ops_is_an_operator() -> None:
    assert sorted(module.name for module in pkgutil.iter_modules(m3_hw.ops.__path__) if not module.name.startswith("_")) == OPERATORS


@pytest.mark.parametrize("op", OPERATORS)
def test_operator_docstring_says_what_it_must(op: str) -> None:
    doc = inspect.cleandoc(specs()[op].reference.__doc__ or "")
    summary, _, rest = doc.partition("\n")
    assert summary.endswith(".")
    assert len(summary) <= 120
    found = sections(doc)
    assert tuple(found) == SECTIONS
    assert all(found.values())
    formula = re.split(r"^Args:", rest, flags=re.MULTILINE)[0]
    assert "=" in formula, "no formula between the summary and Args"
    assert list(described(found["Args"])) == list(inspect.signature(specs()[op].reference).parameters)
    assert "ContractError" in found["Raises"]
    assert re.search(r"fresh|in place|None", found["Returns"]), "Returns says nothing of aliasing"


@pytest.mark.parametrize("name", sorted(public_functions()))
def test_public_function_docstring_says_what_it_must(name: str) -> None:
    function = public_functions()[name]
    found = sections(function.__doc__ or "")
    assert (function.__doc__ or "").partition("\n")[0].endswith(".")
    parameters = list(inspect.signature(function).parameters)
    if parameters:
        assert set(described(found["Args"])) == set(parameters)
    if name not in NOT_RAISED_ON:
        assert "Error" in found["Raises"]


@pytest.mark.parametrize("op", OPERATORS)
def test_every_tensor_argument_is_positional(op: str) -> None:
    for parameter in inspect.signature(specs()[op].reference).parameters.values():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            assert parameter.annotation in (int, float, bool, str, torch.dtype), parameter.name


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_unsupported_toml_lists_what_the_backend_lacks_and_nothing_else(name: str) -> None:
    backend: Backend = backends()[name]
    whole = [gap.op for gap in backend.gaps if not (gap.dtypes or gap.samples or gap.checks)]
    assert len(whole) == len(set(whole))
    assert sorted(whole) == sorted(op for op in specs() if not backend.has(op))
    for gap in backend.gaps:
        assert gap.op in specs()
        assert gap.reason


@pytest.mark.parametrize("name", sorted(BUILT_IN))
def test_every_file_of_a_backend_is_an_operator_or_private(name: str) -> None:
    folder = ROOT / "backends" / name
    public = {path.stem for path in folder.glob("*.py") if not path.stem.startswith("_")}
    assert public <= set(specs())


def test_backends_are_importable_under_the_package_alone() -> None:
    with pytest.raises(ImportError, match=r"import this package as m3_hw\.backends"):
        importlib.import_module("backends")

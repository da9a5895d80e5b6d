"""`m3-hw`: what it prints, what it writes, and its exit status."""

import json
import os
import subprocess
import sys
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from m3_hw import backend as backend_module
from m3_hw import catalogue
from m3_hw.backend import BUILT_IN
from m3_hw.cli import app
from m3_hw.dispatch import backends, specs
from m3_hw.parity.results import Report

ROOT = Path(__file__).resolve().parent.parent


def m3_hw(*arguments: str) -> Result:
    return CliRunner().invoke(app, list(arguments))


def error_line(result: Result) -> str:
    """Standard error, which must be one line without a traceback."""
    assert result.exit_code == 2, result.output
    assert result.stderr.count("\n") == 1, result.stderr
    assert result.stderr.startswith("m3-hw: ")
    return result.stderr


def usage_error(result: Result) -> str:
    """Standard error of a usage error, its box and line breaks taken away."""
    assert result.exit_code == 2, result.output
    return " ".join(result.stderr.replace("│", " ").split())


# doctor


def test_doctor_lists_every_operator_and_backend():
    facts = json.loads(m3_hw("doctor", "--json").stdout)
    listed = {(row["op"], row["backend"]) for row in facts["operators"]}
    assert listed == {(op, name) for op in specs() for name in ("reference", *backends())}
    assert facts["backends"]["cpu"]["reasons"] == []
    assert facts["environment"]["versions"]["torch"]


def test_doctor_says_why_a_backend_cannot_run():
    facts = json.loads(m3_hw("doctor", "--json").stdout)
    for row in facts["operators"]:
        assert bool(row["reasons"]) == (row["status"] in ("missing", "unavailable")), row


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (None, "auto, by the device of the tensors"),
        ("cpu", "cpu, by M3_HW_BACKEND"),
        ("nope", "every call fails: M3_HW_BACKEND has 'nope'"),
    ],
)
def test_doctor_says_which_backend_is_asked_for(value: str | None, says: str, monkeypatch: pytest.MonkeyPatch):
    if value:
        monkeypatch.setenv("M3_HW_BACKEND", value)
    assert says in m3_hw("doctor").stdout


def test_doctor_prints_what_it_knows_on_a_narrow_terminal(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("COLUMNS", "60")
    result = m3_hw("doctor")
    assert result.exit_code == 0
    for text in ("versions", "float32_matmul_precision", "rms_norm", "available"):
        assert text in result.stdout


@pytest.fixture
def fresh_backends():
    """Backends are discovered once a process: forget them before and after."""
    backends.cache_clear()
    yield
    backends.cache_clear()


@pytest.mark.usefixtures("fresh_backends")
def test_doctor_survives_a_broken_and_an_absent_backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    package = tmp_path / "broken_backend"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('libtriton.so: undefined symbol')\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(backend_module, "BUILT_IN", {**BUILT_IN, "broken": "broken_backend", "absent": "no_such_package"})
    result = m3_hw("doctor", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert "undefined symbol" in facts["backends"]["broken"]["reasons"][0]
    assert "not installed" in facts["backends"]["absent"]["reasons"][0]
    rows = {row["backend"]: row for row in facts["operators"] if row["op"] == "rms_norm"}
    assert rows["broken"]["status"] == rows["absent"]["status"] == "unavailable"
    assert "undefined symbol" in rows["broken"]["reasons"][0]
    assert rows["cpu"]["status"] == "available"
    assert m3_hw("doctor").exit_code == 0


def test_doctor_survives_broken_packages_and_tools(tmp_path: Path):
    """A triton and a torch_npu that raise on import, and drivers' tools that fail: a report all the same."""
    for name in ("triton", "torch_npu"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise OSError('libascend_hal.so: cannot open shared object file')\n")
    for name in ("nvidia-smi", "npu-smi"):
        (tmp_path / name).write_text("#!/bin/sh\nexit 9\n")
        (tmp_path / name).chmod(0o755)
    variables = {"PYTHONPATH": str(tmp_path), "PATH": f"{tmp_path}:{os.environ['PATH']}", "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
    done = run_program("doctor", "--json", **variables)
    assert done.returncode == 0, done.stderr
    facts = json.loads(done.stdout)
    assert "exited with 9" in facts["environment"]["drivers"]["nvidia"]
    assert {row["status"] for row in facts["operators"] if row["backend"] == "cpu"} <= {"available", "missing"}


def run_program(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """The program in a process of its own."""
    command = [sys.executable, "-c", "from m3_hw.cli import main; main()", *arguments]
    return subprocess.run(command, capture_output=True, text=True, env={**os.environ, **variables}, timeout=240, check=False)


# ops


def test_ops_lists_signatures():
    result = m3_hw("ops")
    assert "rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor" in result.stdout
    assert all(f"{op}(" in result.stdout for op in specs())


def test_ops_json_has_everything_of_an_operator():
    (entry,) = json.loads(m3_hw("ops", "--json", "--op", "rms_norm").stdout)
    assert entry["formula"] == "y = x * rsqrt(mean(x^2) + eps) * (1 + weight)"
    assert [name for name, _ in entry["args"]] == ["x", "weight", "eps"]
    assert entry["tolerances"]["y"]["bfloat16"]["rule"] == "ulp"
    assert "cpu" in entry["backends"]


def test_operators_page_is_up_to_date():
    """Made by `m3-hw ops --markdown >docs/operators.md`."""
    assert m3_hw("ops", "--markdown").stdout == (ROOT / "docs" / "operators.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("op", sorted(specs()))
def test_catalogue_reads_every_docstring(op: str):
    (entry,) = catalogue.catalogue([op])
    named = {name.strip() for names, _ in entry.doc.args for name in names.split(",")}
    assert named == set(specs()[op].reference.__annotations__) - {"return"}
    assert entry.doc.summary.endswith(".")
    assert entry.doc.formula
    assert {"Returns", "Raises", "Numerics", "Source"} <= set(entry.doc.sections)


def test_markdown_tables_have_equal_rows():
    """A pipe inside a cell would break the page."""
    import re

    width = 0
    for line in catalogue.markdown(catalogue.catalogue()).splitlines():
        if not line.startswith("| "):
            width = 0
            continue
        cells = len(re.findall(r"(?<!\\)\|", line))
        assert width in (0, cells), line
        width = cells


def test_ops_refuses_two_formats():
    assert "exclude each other" in usage_error(m3_hw("ops", "--markdown", "--json"))


# parity


def test_parity_lists_cases_and_runs_none():
    result = m3_hw("parity", "--list", "--op", "rms_norm", "--backend", "cpu", "--dtype", "bf16,float32", "--sample", "rows")
    assert result.stdout.split() == ["rms_norm-cpu-bfloat16-rows", "rms_norm-cpu-float32-rows"]


def test_parity_options_repeat_and_hold_commas():
    once = m3_hw("parity", "--list", "--op", "rms_norm,swiglu_oai", "--backend", "cpu").stdout
    twice = m3_hw("parity", "--list", "--op", "rms_norm", "--op", " swiglu_oai", "--backend", "cpu,cpu").stdout
    assert once == twice
    assert "swiglu_oai-cpu-" in once


def test_parity_writes_every_report(tmp_path: Path):
    files = {name: tmp_path / "new" / f"report.{name}" for name in ("html", "junit", "json", "markdown")}
    options = [text for name, file in files.items() for text in (f"--{name}", str(file))]
    result = m3_hw("parity", "--op", "rms_norm", "--backend", "cpu", "--sample", "rows,odd", "--check", "parity", *options)
    assert result.exit_code == 0, result.output
    report = Report.load(files["json"])
    assert report.passed
    assert {r.case.sample for r in report.results} == {"rows", "odd"}
    assert "rms_norm" in files["html"].read_text()
    assert ET.parse(files["junit"]).getroot().get("failures") == "0"
    assert "`rms_norm`" in files["markdown"].read_text()
    assert "6/6" in result.stderr


def test_parity_updates_a_table_between_its_markers(tmp_path: Path):
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- parity-table -->\nold\n<!-- /parity-table -->\nafter\n")
    m3_hw("parity", "--op", "rms_norm", "--backend", "cpu", "--check", "parity", "--markdown", str(page))
    assert page.read_text().startswith("before\n<!-- parity-table -->\n| operator | cpu |")
    assert page.read_text().endswith("<!-- /parity-table -->\nafter\n")


def test_parity_exits_with_1_when_a_case_fails(tmp_path: Path, wrong_rms_norm: None):
    result = m3_hw("parity", "--op", "rms_norm", "--backend", "cpu", "--check", "parity", "--json", str(tmp_path / "r.json"))
    assert result.exit_code == 1
    assert Report.load(tmp_path / "r.json").summary["fail"] > 0


@pytest.fixture
def wrong_rms_norm(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU backend whose rms_norm is 1 % too large."""
    from m3_hw import dispatch
    from m3_hw.backends.cpu import rms_norm as module

    right = module.rms_norm
    monkeypatch.setattr(module, "rms_norm", lambda x, weight, eps: right(x, weight, eps) * 1.01)
    monkeypatch.setitem(dispatch._operators["rms_norm"].__dict__, "_table", {})


def test_parity_exits_with_1_when_nothing_could_run():
    assert m3_hw("parity", "--op", "rms_norm", "--backend", "ascend", "--check", "parity").exit_code == 1


def test_parity_certify_goes_on_where_it_stopped(tmp_path: Path):
    state, report = tmp_path / "certify.state", tmp_path / "certify.json"
    options = ("--tier", "certify", "--op", "rms_norm", "--backend", "cpu", "--cases", "9", "--state", str(state), "--json", str(report))
    assert m3_hw("parity", *options).exit_code == 0
    first = Report.load(report)
    assert first.tier == "certify"
    assert sum(r.cases for r in first.results) == 9
    again = m3_hw("parity", *options)
    assert "/9" not in again.stderr, "nothing is run twice"
    assert Report.load(report).summary == first.summary


@pytest.mark.parametrize(
    ("option", "value", "accepted"),
    [
        ("--op", "rms_nrom", "rms_norm"),
        ("--backend", "cudaa", "cuda"),
        ("--dtype", "int8", "bfloat16"),
        ("--tier", "large", "certify, model, small, stress"),
        ("--sample", "nope", "rows"),
        ("--check", "nope", "parity"),
    ],
)
def test_unknown_names_are_refused_with_the_accepted_ones(option: str, value: str, accepted: str):
    message = error_line(m3_hw("parity", option, value))
    assert repr(value) in message
    assert accepted in message


def test_nothing_to_do_is_an_error():
    assert "no case" in error_line(m3_hw("parity", "--op", "rms_norm", "--sample", "rows", "--tier", "stress"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        (("--cases", "5"), "--tier certify"),
        (("--state", "x"), "--tier certify"),
        (("--tier", "certify", "--cases", "0"), "--cases"),
        (("--tier", "certify", "--check", "parity"), "don't go with"),
        (("--seed", "x"), "--seed"),
        (("--nope",), "--nope"),
    ],
)
def test_wrong_usage_is_refused(options: tuple[str, ...], says: str):
    assert says in usage_error(m3_hw("parity", *options))


def test_tier_certify_stands_alone():
    assert "certify alone" in error_line(m3_hw("parity", "--tier", "small,certify"))


def test_unusable_files_are_named(tmp_path: Path):
    (tmp_path / "file").write_text("")
    options = ("--op", "rms_norm", "--backend", "cpu", "--sample", "rows", "--check", "parity")
    message = m3_hw("parity", *options, "--json", str(tmp_path / "file" / "r.json"))
    assert message.exit_code == 2
    assert f"m3-hw: {tmp_path / 'file'}" in message.stderr.splitlines()[-1]
    page = tmp_path / "page.md"
    page.write_text("no markers\n")
    assert "parity-table" in m3_hw("parity", *options, "--markdown", str(page)).stderr.splitlines()[-1]


# recordings

CASES = ("--op", "rms_norm", "--sample", "rows,odd")


def test_recordings_are_compared_elsewhere(tmp_path: Path):
    a, b, report = tmp_path / "new" / "a.m3p", tmp_path / "b.m3p", tmp_path / "r.json"
    assert m3_hw("parity", "record", "--backend", "reference", "-o", str(a), *CASES).exit_code == 0
    assert m3_hw("parity", "record", "--backend", "cpu", "-o", str(b), *CASES).exit_code == 0
    assert m3_hw("parity", "compare", str(a), str(b), "--json", str(report)).exit_code == 0
    assert {r.case.sample for r in Report.load(report).results} == {"rows", "odd"}
    assert m3_hw("parity", "check", str(a), "--backend", "cpu").exit_code == 0


def test_recording_that_differs_exits_with_1(tmp_path: Path, wrong_rms_norm: None):
    a = tmp_path / "a.m3p"
    assert m3_hw("parity", "record", "--backend", "reference", "-o", str(a), *CASES).exit_code == 0
    assert m3_hw("parity", "check", str(a), "--backend", "cpu").exit_code == 1


def test_unusable_recordings_are_refused(tmp_path: Path):
    a = tmp_path / "a.m3p"
    assert str(a) in error_line(m3_hw("parity", "compare", str(a), str(a)))
    a.write_text("not a recording")
    assert str(a) in error_line(m3_hw("parity", "check", str(a), "--backend", "cpu"))
    assert "'cup'" in error_line(m3_hw("parity", "check", str(a), "--backend", "cup"))
    assert "'cup'" in error_line(m3_hw("parity", "record", "-o", str(a), "--backend", "cup"))
    assert "can't be used here" in error_line(m3_hw("parity", "record", "-o", str(a), "--backend", "ascend", *CASES))
    assert "drawn anew" in usage_error(m3_hw("parity", "record", "-o", str(a), "--backend", "cpu", "--tier", "certify"))


# the program


def test_program_lists_its_commands():
    done = run_program("--help")
    assert done.returncode == 0
    assert all(command in done.stdout for command in ("doctor", "ops", "parity", "bench"))


def test_program_says_an_error_in_one_line():
    done = run_program("ops", "--op", "nope")
    assert done.returncode == 2
    assert done.stderr.startswith("m3-hw: op has 'nope'; accepted: ")
    assert "Traceback" not in done.stderr


def test_program_refuses_an_unknown_backend_in_the_environment():
    done = run_program("bench", "--quick", "--op", "rms_norm", M3_HW_SIMULATE="yes")
    assert done.returncode == 2
    assert "M3_HW_SIMULATE has 'yes'; accepted: 0, 1" in done.stderr


def test_help_loads_no_plotting_and_no_models():
    code = "import sys, m3_hw.cli; print([m for m in ('matplotlib', 'transformers', 'm3_hw.bench.run') if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=120)
    assert done.stdout.strip() == "[]"

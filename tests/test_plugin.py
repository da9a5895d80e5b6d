"""A backend of a separate distribution, installed and used in processes of its own."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from m3_hw.backend import Backend, Gap
from m3_hw.dispatch import specs

SOURCE = Path(__file__).parent / "plugin_dist"
CALL = "torch.tensor([[3.0, 4.0]]), torch.zeros(2), 1e-6"
HEAD = f"""
import torch
import m3_hw
call = ({CALL})
"""


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The plugin as pip installs it, in a folder of its own."""
    source, target = tmp_path_factory.mktemp("source") / "plugin", tmp_path_factory.mktemp("site")
    shutil.copytree(SOURCE, source, ignore=shutil.ignore_patterns("__pycache__"))
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--target", str(target)]
    done = subprocess.run([*pip, str(source)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return target


@pytest.fixture
def site(installed: Path, tmp_path: Path) -> Path:
    """A copy of the installed plugin, to be spoilt."""
    return shutil.copytree(installed, tmp_path / "site")


def run(site: Path, program: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("M3_HW_")}
    environment |= {"PYTHONPATH": str(site), "PYTHONWARNINGS": "error::RuntimeWarning", **variables}
    return subprocess.run(
        [sys.executable, "-c", HEAD + program], env=environment, cwd=site, capture_output=True, text=True, timeout=120, check=False
    )


def answer(site: Path, program: str, **variables: str) -> list[str]:
    """The lines that a program prints; it must succeed."""
    done = run(site, program, **variables)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def last_error(site: Path, program: str, **variables: str) -> str:
    """The last line of a traceback; the program must fail."""
    done = run(site, program, **variables)
    assert done.returncode == 1, done.stdout
    return done.stderr.strip().splitlines()[-1]


def test_the_plugin_is_found_and_run_by_name_and_auto_still_takes_cpu(installed: Path) -> None:
    program = """
import m3_hw_toy.rms_norm as toy
from unittest.mock import patch
with patch.object(toy, "rms_norm", autospec=True, side_effect=toy.rms_norm) as spy:
    y = m3_hw.rms_norm(*call)
print(spy.call_count, *(f"{value:.4f}" for value in y[0].tolist()))

from m3_hw.dispatch import backends
print(*backends())
print(m3_hw.selected("rms_norm", *call).backend)
with m3_hw.use_backend("auto"):
    print(m3_hw.selected("rms_norm", *call).backend)
"""
    expected = ["1 0.8485 1.1314", "cpu cuda ascend toy", "toy", "cpu"]
    assert answer(installed, program, M3_HW_BACKEND="toy") == expected
    found = answer(installed, "print(m3_hw.selected('rms_norm', *call).backend)")
    assert found == ["cpu"]


def test_the_plugin_is_in_the_capabilities_with_its_reasons(installed: Path) -> None:
    program = """
for row in m3_hw.capabilities():
    if row.backend == "toy" and row.op in ("rms_norm", "select_blocks"):
        print(row.op, row.status, *row.reasons)
"""
    assert sorted(answer(installed, program)) == ["rms_norm available", "select_blocks missing the toy backend has rms_norm alone"]


def test_a_drifted_signature_fails_on_load(site: Path) -> None:
    module = site / "m3_hw_toy" / "rms_norm.py"
    module.write_text(module.read_text().replace("def rms_norm(x: Tensor, weight: Tensor, eps: float)", "def rms_norm(x, weight, epsilon)"))
    error = last_error(site, "m3_hw.rms_norm(*call)", M3_HW_BACKEND="toy")
    assert "backend 'toy': signature of rms_norm is (x, weight, epsilon); the spec's is (x, weight, eps)" in error


def test_a_module_without_its_function_fails_on_load(site: Path) -> None:
    (site / "m3_hw_toy" / "rms_norm.py").write_text("def rmsnorm(x, weight, eps): ...\n")
    error = last_error(site, "m3_hw.rms_norm(*call)", M3_HW_BACKEND="toy")
    assert "m3_hw_toy.rms_norm has no function 'rms_norm'" in error


@pytest.mark.parametrize("name", ["cpu", "reference", "auto"])
def test_a_name_that_is_taken_raises(site: Path, name: str) -> None:
    entry_points = next(site.glob("*.dist-info")) / "entry_points.txt"
    entry_points.write_text(f"[m3_hw.backends]\n{name} = m3_hw_toy\n")
    error = last_error(site, "m3_hw.rms_norm(*call)")
    assert f"entry point 'm3_hw_toy' registers a backend named {name!r}, which is taken" in error


def test_a_broken_import_propagates_and_is_never_called_not_installed(site: Path) -> None:
    package = site / "m3_hw_toy" / "__init__.py"
    package.write_text("import m3_hw_toy_needs_this\n" + package.read_text())
    error = last_error(site, "m3_hw.rms_norm(*call)", M3_HW_BACKEND="toy", M3_HW_FALLBACK="reference")
    assert error == "ModuleNotFoundError: No module named 'm3_hw_toy_needs_this'"


def test_a_broken_operator_propagates(site: Path) -> None:
    module = site / "m3_hw_toy" / "rms_norm.py"
    module.write_text("from torch import no_such_name\n" + module.read_text())
    error = last_error(site, "m3_hw.rms_norm(*call)", M3_HW_BACKEND="toy", M3_HW_FALLBACK="reference")
    assert error.startswith("ImportError: cannot import name 'no_such_name'")


def test_an_absent_package_is_not_installed(site: Path) -> None:
    shutil.rmtree(site / "m3_hw_toy")
    error = last_error(site, "m3_hw.rms_norm(*call)", M3_HW_BACKEND="toy")
    assert error.endswith("BackendUnavailableError: backend 'toy': its package m3_hw_toy is not installed")
    assert answer(site, "print(*m3_hw.why_not('rms_norm', 'toy'))") == ["backend 'toy': its package m3_hw_toy is not installed"]


def test_auto_doesnt_import_a_plugin_that_it_doesnt_take(site: Path) -> None:
    (site / "m3_hw_toy" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    assert answer(site, "m3_hw.rms_norm(*call); print('ran')") == ["ran"]


def test_the_plugin_lists_what_it_lacks(toy_backend: Backend) -> None:
    assert {gap.op for gap in toy_backend.gaps} == set(specs()) - {"rms_norm"}
    assert all(isinstance(gap, Gap) and gap.reason for gap in toy_backend.gaps)


def suite(site: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    """The parity suite on the plugin, run as its author would."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-p",
        "m3_hw.parity.pytest_plugin",
        "--pyargs",
        "m3_hw.parity.suite",
        "-p",
        "no:cacheprovider",
    ]
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("M3_HW_", "PYTEST_"))} | {
        "PYTHONPATH": str(site)
    }
    return subprocess.run(
        [*command, "--m3-hw-backend", "toy", *arguments],
        env=environment,
        cwd=site,
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )


def test_the_suite_passes_on_the_plugin_and_skips_its_listed_gaps(installed: Path) -> None:
    done = suite(installed, "--m3-hw-check", "parity", "--m3-hw-check", "strided", "--m3-hw-check", "contract_errors")
    assert done.returncode == 0, done.stdout
    passed, skipped = (int(count) for count in re.search(r"(\d+) passed, (\d+) skipped", done.stdout).groups())  # type: ignore[union-attr]
    assert passed > len(specs()["rms_norm"].samples)
    missing = [spec for name, spec in specs().items() if name != "rms_norm"]
    assert skipped == sum(len(spec.dtypes) for spec in missing), "one for each operator that is missing, in each dtype"


def test_the_suite_names_a_wrong_result_of_the_plugin(site: Path) -> None:
    module = site / "m3_hw_toy" / "rms_norm.py"
    module.write_text(module.read_text().replace("1 + weight", "weight"))
    done = suite(site, "--m3-hw-op", "rms_norm", "--m3-hw-check", "parity")
    assert done.returncode == 1
    assert "FAILED" in done.stdout
    assert "rms_norm-toy-float32-rows-parity" in done.stdout


def test_the_suite_fails_on_a_gap_that_is_not_listed(site: Path) -> None:
    gaps = site / "m3_hw_toy" / "unsupported.toml"
    gaps.write_text(gaps.read_text().replace('op = "rope"', 'op = "rms_norm"'))
    done = suite(site, "--m3-hw-op", "rms_norm", "--m3-hw-op", "rope", "--m3-hw-check", "parity")
    assert done.returncode == 1
    assert "no implementation, and unsupported.toml doesn't say why" in done.stdout
    assert "lists this as a gap" in done.stdout

"""The suite that an outside backend's author runs: one command, and it fails for what is wrong."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parent / "plugin_dist" / "m3_hw_toy"
ENTRY_POINTS = "[m3_hw.backends]\ntoy = m3_hw_toy\n"


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """The toy backend as an installed distribution, in a folder that tests may spoil."""
    shutil.copytree(SOURCE, tmp_path / "m3_hw_toy", ignore=shutil.ignore_patterns("__pycache__"))
    metadata = tmp_path / "m3_hw_toy-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: m3-hw-toy\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text(ENTRY_POINTS)
    return tmp_path


def suite(site: Path, *arguments: str) -> tuple[int, str]:
    """Exit status and output of the suite on the toy backend, without this project's own settings."""
    command = [sys.executable, "-m", "pytest", "-p", "m3_hw.parity.pytest_plugin", "--pyargs", "m3_hw.parity.suite", "-q", "-rs"]
    environment = {**os.environ, "PYTHONPATH": str(site), "OMP_NUM_THREADS": "1"}
    picked = ["--m3-hw-backend", "toy", "--m3-hw-dtype", "float32", "-p", "no:cacheprovider", *arguments]
    done = subprocess.run([*command, *picked], cwd=site, env=environment, capture_output=True, text=True, timeout=250, check=False)
    return done.returncode, done.stdout + done.stderr


def test_the_suite_passes_a_right_backend_and_skips_its_listed_gaps(site: Path) -> None:
    status, output = suite(site)
    assert status == 0, output
    assert "gap: the toy backend has rms_norm alone" in output


def test_the_suite_fails_a_wrong_backend(site: Path) -> None:
    module = site / "m3_hw_toy" / "rms_norm.py"
    module.write_text(module.read_text().replace("(1 + weight.float())", "weight.float()"))
    status, output = suite(site, "--m3-hw-op", "rms_norm", "--m3-hw-check", "parity")
    assert status == 1, output
    assert "rms_norm-toy-float32-rows-parity" in output


def test_the_suite_fails_a_gap_that_is_not_listed(site: Path) -> None:
    (site / "m3_hw_toy" / "unsupported.toml").write_text("")
    status, output = suite(site, "--m3-hw-op", "rope")
    assert status == 1, output
    assert "unsupported.toml doesn't say why" in output


def test_the_suite_fails_a_listed_gap_that_passes(site: Path) -> None:
    listed = site / "m3_hw_toy" / "unsupported.toml"
    listed.write_text(listed.read_text() + '\n[[gap]]\nop = "rms_norm"\nsamples = ["odd"]\nreason = "thought to be wrong"\n')
    status, output = suite(site, "--m3-hw-op", "rms_norm", "--m3-hw-check", "parity")
    assert status == 1, output
    assert "thought to be wrong), but it passes: remove the entry" in output


def test_the_suite_fails_an_entry_that_names_nothing(site: Path) -> None:
    listed = site / "m3_hw_toy" / "unsupported.toml"
    listed.write_text(listed.read_text() + '\n[[gap]]\nop = "rms_norm"\nsamples = ["no_such"]\nreason = "none"\n')
    status, output = suite(site, "--m3-hw-op", "rms_norm", "--m3-hw-check", "parity")
    assert status == 1, output
    assert "samples has 'no_such'" in output


def test_an_unknown_backend_is_a_usage_error_that_lists_the_known_ones(site: Path) -> None:
    status, output = suite(site, "--m3-hw-backend", "toi")
    assert status == 4, output
    assert "backend has 'toi'; accepted: ascend, cpu, cuda, reference, toy" in output

"""The environment report: complete, plain data, and never stopped by what is missing or broken."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from m3_hw import environment as module
from m3_hw.environment import environment


def tool(folder: Path, name: str, script: str) -> None:
    """An executable of that name."""
    file = folder / name
    file.write_text(f"#!/bin/sh\n{script}\n")
    file.chmod(0o755)


@pytest.fixture
def bin_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An otherwise empty PATH: no driver's tool but those that a test makes."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    return folder


def test_is_plain_json_data():
    facts = environment()
    assert json.loads(json.dumps(facts)) == facts


def test_says_what_the_run_stood_on():
    facts = environment()
    assert facts["versions"]["torch"] == torch.__version__
    assert facts["versions"]["python"].startswith("3.")
    assert facts["devices"]["cpu"]["threads"] == torch.get_num_threads()
    assert facts["system"]["cpu"]
    assert facts["system"]["cpu_features"]["torch_capability"] == torch.backends.cpu.get_cpu_capability()


def test_reports_variables_that_change_numerics(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("NVIDIA_TF32_OVERRIDE", "1")
    monkeypatch.setenv("LCCL_DETERMINISTIC", "1")
    monkeypatch.setenv("M3_HW_SOMETHING", "x")
    monkeypatch.setenv("HOME_ALONE", "x")
    variables = environment()["variables"]
    assert (variables["NVIDIA_TF32_OVERRIDE"], variables["LCCL_DETERMINISTIC"], variables["M3_HW_SOMETHING"]) == ("1", "1", "x")
    assert "HOME_ALONE" not in variables


def test_reports_torch_settings_that_change_numerics():
    before = environment()["torch"]
    matmul, precision = torch.backends.cuda.matmul, torch.get_float32_matmul_precision()
    reduced = matmul.allow_bf16_reduced_precision_reduction
    try:
        torch.set_default_dtype(torch.float64)
        torch.set_float32_matmul_precision("high")
        torch.use_deterministic_algorithms(True)
        matmul.allow_bf16_reduced_precision_reduction = not before["cuda_matmul_allow_bf16_reduced_precision_reduction"]
        after = environment()["torch"]
    finally:
        torch.set_default_dtype(torch.float32)
        torch.set_float32_matmul_precision(precision)
        torch.use_deterministic_algorithms(False)
        matmul.allow_bf16_reduced_precision_reduction = reduced
    changed = {name for name in before if before[name] != after[name]}
    wanted = {"default_dtype", "float32_matmul_precision", "deterministic_algorithms", "cuda_matmul_allow_bf16_reduced_precision_reduction"}
    assert wanted <= changed
    assert "error" not in " ".join(map(str, before.values()))


def test_missing_tools_are_none(bin_folder: Path):
    assert environment()["drivers"] == {"nvidia": None, "npu": None}


def test_reads_drivers(bin_folder: Path):
    tool(bin_folder, "nvidia-smi", "echo 'NVIDIA H200, 570.1, 143771 MiB'; echo 'NVIDIA H200, 570.1, 143771 MiB'")
    tool(bin_folder, "npu-smi", "echo '| npu-smi 24.1 |'")
    assert environment()["drivers"] == {"nvidia": ["NVIDIA H200, 570.1, 143771 MiB"] * 2, "npu": ["| npu-smi 24.1 |"]}


@pytest.mark.parametrize(
    ("script", "says"),
    [
        ("echo 'driver mismatch' >&2; exit 9", "exited with 9: driver mismatch"),
        ("printf '\\377\\376'", "\ufffd"),
    ],
)
def test_broken_driver_tool_is_quoted(bin_folder: Path, script: str, says: str):
    tool(bin_folder, "nvidia-smi", script)
    assert says in str(environment()["drivers"]["nvidia"])


def test_tool_that_is_no_program_is_quoted(bin_folder: Path):
    file = bin_folder / "nvidia-smi"
    file.write_bytes(b"\x00\x01")
    file.chmod(0o755)
    assert environment()["drivers"]["nvidia"].startswith("error: OSError: ")


def test_hanging_driver_tool_is_given_up(bin_folder: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(module, "TIMEOUT", 0.2)
    tool(bin_folder, "npu-smi", "while :; do :; done")
    assert environment()["drivers"]["npu"].startswith("error: TimeoutExpired")


def test_reads_cann_version(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASCEND_HOME_PATH", str(tmp_path))
    assert environment()["cann"]["version"].startswith("unknown: ")
    (tmp_path / "version.cfg").write_text("runtime_running_version=[8.5.0]\n")
    assert environment()["cann"] == {"path": str(tmp_path), "file": "version.cfg", "version": "runtime_running_version=[8.5.0]"}


def test_unreadable_cann_is_quoted(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("ASCEND_TOOLKIT_HOME", "x" * 5000)
    monkeypatch.delenv("ASCEND_HOME_PATH", raising=False)
    assert "error" in str(environment()["cann"]) or "unknown" in str(environment()["cann"])


def test_broken_metadata_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "triton-9.9.dist-info").mkdir()  # no METADATA inside: a removed package leaves this behind
    monkeypatch.syspath_prepend(tmp_path)
    facts = environment()
    assert facts["versions"]["triton"] is None or facts["versions"]["triton"].startswith("error: ")
    assert facts["versions"]["torch"] == torch.__version__


def test_failing_device_query_is_quoted(monkeypatch: pytest.MonkeyPatch):
    def fail() -> bool:
        raise RuntimeError("driver too old")

    monkeypatch.setattr(torch.cuda, "is_available", fail)
    assert environment()["devices"]["cuda"] == "error: RuntimeError: driver too old"


def test_imports_neither_triton_nor_torch_npu(tmp_path: Path):
    """Their presence is read from metadata: packages that raise on import do no harm."""
    for name in ("triton", "torch_npu"):
        package = tmp_path / "site" / name
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')\n")
        info = tmp_path / "site" / f"{name}-1.2.dist-info"
        info.mkdir()
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.2\n")
    code = "import sys; sys.path.insert(0, sys.argv[1]); from m3_hw.environment import versions; print(versions())"
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path / "site")], capture_output=True, text=True, check=True, timeout=120)
    assert "'triton': '1.2'" in done.stdout
    assert "'torch-npu': '1.2'" in done.stdout

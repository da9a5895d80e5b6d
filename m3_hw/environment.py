"""What a run stood on: versions, devices, drivers, and every setting that changes numerics.

Nothing here raises because something is missing or broken: None says "not there", a text that starts with
"error:" says what went wrong. Nothing that is missing is initialised, and neither triton nor torch_npu is imported.
"""

import os
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil
import torch

from m3_hw.errors import PROBE_ERRORS

PACKAGES = ("m3-hw", "torch", "numpy", "triton", "triton-ascend", "torch-npu", "transformers", "safetensors")

VARIABLES = (
    "ASCEND_LAUNCH_BLOCKING",
    "ASCEND_RT_VISIBLE_DEVICES",
    "ATB_LLM_LCOC_ENABLE",
    "ATB_MATMUL_SHUFFLE_K_ENABLE",
    "ATEN_CPU_CAPABILITY",
    "CLOSE_MATMUL_K_SHIFT",
    "CUBLAS_WORKSPACE_CONFIG",
    "CUDA_LAUNCH_BLOCKING",
    "CUDA_VISIBLE_DEVICES",
    "FAKE_NPU_COUNT",
    "HCCL_DETERMINISTIC",
    "LCCL_DETERMINISTIC",
    "MKL_CBWR",
    "NVIDIA_TF32_OVERRIDE",
    "OMP_NUM_THREADS",
    "ONEDNN_DEFAULT_FPMATH_MODE",
    "ONEDNN_MAX_CPU_ISA",
    "OPENBLAS_CORETYPE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",
    "TORCH_DEVICE_BACKEND_AUTOLOAD",
    "TRITON_F32_DEFAULT",
    "TRITON_INTERPRET",
)
"""Variables that change which device runs, in what precision, or in what order it sums. M3_HW_* are reported too."""

CPU_FEATURES = re.compile(r"^(amx|avx|fma|f16c|sve|sme(?!p)|bf16|i8mm|asimd|neon)")
"""Flags of /proc/cpuinfo that decide which arithmetic a matrix product runs in."""

TIMEOUT = 10
"""Seconds that a driver's tool may take: a hung driver must not hang the report."""


def environment() -> dict[str, Any]:
    """What this process stands on, as plain JSON data.

    Returns:
        versions: by package, None if it is not installed; also python and what torch was built for.
        system: the operating system, CPU model and its instruction sets, memory in bytes.
        cann, drivers: the CANN toolkit's version, and what nvidia-smi and npu-smi say; None if not there.
        devices: cores and threads of the CPU, CUDA and NPU devices that this process could use.
        variables: those set among `VARIABLES` and M3_HW_*.
        torch: settings that change precision or the order of sums.
    """
    return {
        "versions": versions(),
        "system": {"os": _probe(platform.platform), "cpu": _probe(_cpu_model), "cpu_features": _probe(_cpu_features), "memory": _memory()},
        "cann": _probe(_cann_version),
        "drivers": {"nvidia": _probe(_nvidia_driver), "npu": _probe(_npu_driver)},
        "devices": {"cpu": _probe(_cpu_threads), "cuda": _probe(_cuda_devices), "npu": _probe(_npu_devices)},
        "variables": {name: os.environ[name] for name in sorted(os.environ) if name in VARIABLES or name.startswith("M3_HW_")},
        "torch": {name: _probe(read) for name, read in _torch_settings().items()},
    }


def versions() -> dict[str, str | None]:
    """Installed versions, from the distributions' metadata: nothing is imported for them."""
    installed = {name: _probe(partial(_version, name)) for name in PACKAGES}
    built_for = {"torch_cuda": _probe(lambda: torch.version.cuda), "torch_git": _probe(lambda: torch.version.git_version)}
    return {"python": platform.python_version(), **installed, **built_for}


def _probe(read: Callable[[], Any]) -> Any:
    """What `read` gives, or the text of what went wrong."""
    try:
        return read()
    except PROBE_ERRORS as error:
        return f"error: {type(error).__name__}: {error}"


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _cpu_info() -> str:
    return Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace") if sys.platform == "linux" else ""


def _cpu_model() -> str:
    found = re.search(r"^(?:model name|Processor|Model)\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    return found[1] if found else platform.processor() or platform.machine()


def _cpu_features() -> dict[str, Any]:
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", _cpu_info(), re.MULTILINE)
    present = sorted(flag for flag in (flags[1].split() if flags else ()) if CPU_FEATURES.match(flag))
    return {"torch_capability": torch.backends.cpu.get_cpu_capability(), "flags": present}


def _memory() -> Any:
    return _probe(lambda: psutil.virtual_memory().total)


def _cpu_threads() -> dict[str, int | None]:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return {
        "cores": psutil.cpu_count(logical=False),
        "usable": usable,
        "threads": torch.get_num_threads(),
        "interop_threads": torch.get_num_interop_threads(),
    }


def _cuda_devices() -> list[dict[str, Any]]:
    if not torch.cuda.is_available():
        return []
    found = [torch.cuda.get_device_properties(i) for i in range(torch.cuda.device_count())]
    return [
        {
            "name": device.name,
            "capability": f"{device.major}.{device.minor}",
            "memory": device.total_memory,
            "sms": device.multi_processor_count,
        }
        for device in found
    ]


def _npu_devices() -> list[dict[str, Any]]:
    npu = getattr(torch, "npu", None)  # torch loads an installed torch_npu by itself; we never do
    if npu is None or not npu.is_available():
        return []
    return [{"name": npu.get_device_name(i), "memory": npu.get_device_properties(i).total_memory} for i in range(npu.device_count())]


def _cann_version() -> dict[str, str] | None:
    """Path and version text of the CANN toolkit that the environment points at."""
    home = os.environ.get("ASCEND_HOME_PATH") or os.environ.get("ASCEND_TOOLKIT_HOME")
    if not home:
        return None
    names = ("version.cfg", "compiler/version.info", "runtime/version.info", "version.info", "ascend_toolkit_install.info")
    candidates = [Path(home) / name for name in names] + sorted(Path(home).glob("*-linux/ascend_toolkit_install.info"))
    for file in candidates:
        if file.is_file():
            return {"path": home, "file": file.name, "version": file.read_text(encoding="utf-8", errors="replace").strip()}
    return {"path": home, "version": f"unknown: none of {', '.join(names)}"}


def _run(*command: str) -> str | None:
    """Standard output of a driver's tool; None if it is not on PATH."""
    if shutil.which(command[0]) is None:
        return None
    done = subprocess.run(command, capture_output=True, text=True, errors="replace", timeout=TIMEOUT, check=False)
    if done.returncode:
        raise RuntimeError(f"{command[0]} exited with {done.returncode}: {(done.stderr or done.stdout).strip()[:200]}")
    return done.stdout.strip()


def _nvidia_driver() -> list[str] | None:
    text = _run("nvidia-smi", "--query-gpu=name,driver_version,memory.total", "--format=csv,noheader")
    return None if text is None else text.splitlines()


def _npu_driver() -> list[str] | None:
    text = _run("npu-smi", "info")
    return None if text is None else text.splitlines()


def _torch_settings() -> dict[str, Callable[[], Any]]:
    """How to read each setting of torch that changes precision or the order of sums."""
    matmul = torch.backends.cuda.matmul
    return {
        "default_dtype": lambda: str(torch.get_default_dtype()).removeprefix("torch."),
        "float32_matmul_precision": torch.get_float32_matmul_precision,
        "deterministic_algorithms": torch.are_deterministic_algorithms_enabled,
        "deterministic_warn_only": torch.is_deterministic_algorithms_warn_only_enabled,
        "fp32_precision": lambda: torch.backends.fp32_precision,  # type: ignore[attr-defined]
        "flush_denormal": lambda: bool(torch.tensor(1e-310, dtype=torch.float64).mul(1) == 0),
        "cuda_matmul_fp32_precision": lambda: matmul.fp32_precision,
        "cuda_matmul_allow_bf16_reduced_precision_reduction": lambda: matmul.allow_bf16_reduced_precision_reduction,
        "cuda_matmul_allow_fp16_reduced_precision_reduction": lambda: matmul.allow_fp16_reduced_precision_reduction,
        "cuda_matmul_allow_fp16_accumulation": lambda: matmul.allow_fp16_accumulation,
        "cudnn_fp32_precision": lambda: torch.backends.cudnn.fp32_precision,
        "cudnn_deterministic": lambda: torch.backends.cudnn.deterministic,
        "cudnn_benchmark": lambda: torch.backends.cudnn.benchmark,
        "mkldnn": torch.backends.mkldnn.is_available,
        "mkldnn_matmul_fp32_precision": lambda: torch.backends.mkldnn.matmul.fp32_precision,  # type: ignore[attr-defined]
        "sdp_flash": torch.backends.cuda.flash_sdp_enabled,
        "sdp_math_reduced_precision": torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed,
    }

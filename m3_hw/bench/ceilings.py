"""What the device can do at most, measured in the same run: matrix products per dtype, and copying."""

from dataclasses import dataclass, field

import torch

from m3_hw.bench.timing import QUICK, Effort, measure


@dataclass(frozen=True)
class Ceilings:
    """copy: bytes read and written a second. matmul: operations a second by dtype."""

    copy: float
    matmul: dict[str, float] = field(default_factory=dict)

    def floor_seconds(self, num_bytes: float, operations: float, dtype: str) -> float:
        """The least time that moves the bytes and does the operations: the roofline."""
        compute = operations / self.matmul[dtype] if operations and dtype in self.matmul else 0.0
        return max(num_bytes / self.copy, compute)


def measure_ceilings(device: torch.device, dtypes: list[torch.dtype], effort: Effort) -> Ceilings:
    """Best of large square products per dtype, and of a copy that no cache holds."""
    quick = effort is QUICK
    elements = 2**20 if quick else 2**26 if device.type == "cpu" else 2**29
    source = torch.ones(elements, dtype=torch.float32, device=device)
    target = torch.empty_like(source)
    copy = 2 * source.nbytes / min(measure(lambda: target.copy_(source), device, effort).seconds)
    sizes = (64,) if quick else (1024, 2048) if device.type == "cpu" else (4096, 8192)
    matmul = {_name(dtype): max(_matmul(size, dtype, device, effort) for size in sizes) for dtype in dtypes}
    if device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9):
        matmul["float8_e4m3fn"] = max(_scaled_matmul(size, device, effort) for size in sizes)
    return Ceilings(copy, matmul)


def _matmul(size: int, dtype: torch.dtype, device: torch.device, effort: Effort) -> float:
    generator = torch.Generator(device).manual_seed(0)
    a, b = (torch.empty(size, size, dtype=dtype, device=device).uniform_(-1, 1, generator=generator) for _ in range(2))
    return float(2 * size**3 / min(measure(lambda: a @ b, device, effort).seconds))


def _scaled_matmul(size: int, device: torch.device, effort: Effort) -> float:
    generator = torch.Generator(device).manual_seed(0)
    wide = torch.empty(size, size, dtype=torch.bfloat16, device=device).uniform_(-1, 1, generator=generator)
    a, b, one = wide.to(torch.float8_e4m3fn), wide.to(torch.float8_e4m3fn).T, torch.ones((), device=device)
    timing = measure(lambda: torch._scaled_mm(a, b, one, one, out_dtype=torch.bfloat16, use_fast_accum=True), device, effort)
    return float(2 * size**3 / min(timing.seconds))


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

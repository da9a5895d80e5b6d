"""CPU backend: every operator vectorised in PyTorch, for real work on a CPU. Not the reference."""

import torch

DEVICE_TYPE = "cpu"


def unavailable_reasons() -> list[str]:
    return []


def versions() -> dict[str, str]:
    return {"torch": torch.__version__, "capability": torch.backends.cpu.get_cpu_capability(), "threads": str(torch.get_num_threads())}

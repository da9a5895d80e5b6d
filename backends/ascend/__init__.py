"""Ascend backend (torch_npu and our own Triton kernels). Not written yet: unsupported.toml lists every operator."""

DEVICE_TYPE = "npu"


def unavailable_reasons() -> list[str]:
    return ["not written yet"]

"""CUDA backend (Triton; Hopper first). Not written yet: unsupported.toml lists every operator."""

DEVICE_TYPE = "cuda"


def unavailable_reasons() -> list[str]:
    return ["not written yet"]

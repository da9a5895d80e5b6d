"""A backend of one operator, on the CPU."""

DEVICE_TYPE = "cpu"


def unavailable_reasons() -> list[str]:
    return []


def versions() -> dict[str, str]:
    return {"toy": "1.0"}

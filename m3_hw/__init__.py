"""MiniMax-M3's operators behind one interface, with a backend for each accelerator."""

from m3_hw.dispatch import Capability, Selection, capabilities, register, selected, use_backend, why_not
from m3_hw.errors import BackendUnavailableError, ContractError, M3HWError, NotSupportedError
from m3_hw.ops import rms_norm as _rms_norm

rms_norm = register(_rms_norm.SPEC)

__all__ = [
    "BackendUnavailableError",
    "Capability",
    "ContractError",
    "M3HWError",
    "NotSupportedError",
    "Selection",
    "capabilities",
    "rms_norm",
    "selected",
    "use_backend",
    "why_not",
]

"""MiniMax-M3's operators behind one interface, with a backend for each accelerator."""

from m3_hw.dispatch import Capability, Selection, capabilities, register, selected, use_backend, why_not
from m3_hw.errors import BackendUnavailableError, ContractError, M3HWError, NotSupportedError
from m3_hw.ops import dense_attention as _dense_attention
from m3_hw.ops import rms_norm as _rms_norm
from m3_hw.ops import select_blocks as _select_blocks
from m3_hw.ops import sparse_attention as _sparse_attention
from m3_hw.ops import varlen_attention as _varlen_attention

dense_attention = register(_dense_attention.SPEC)
select_blocks = register(_select_blocks.SPEC)
sparse_attention = register(_sparse_attention.SPEC)
varlen_attention = register(_varlen_attention.SPEC)
rms_norm = register(_rms_norm.SPEC)

__all__ = [
    "BackendUnavailableError",
    "Capability",
    "ContractError",
    "M3HWError",
    "NotSupportedError",
    "Selection",
    "capabilities",
    "dense_attention",
    "rms_norm",
    "select_blocks",
    "selected",
    "sparse_attention",
    "use_backend",
    "varlen_attention",
    "why_not",
]

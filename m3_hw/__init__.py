"""MiniMax-M3's operators behind one interface, with a backend for each accelerator."""

from m3_hw.dispatch import Capability, Selection, capabilities, register, selected, use_backend, why_not
from m3_hw.errors import BackendUnavailableError, BundleError, ContractError, M3HWError, NotSupportedError
from m3_hw.ops import add_rms_norm as _add_rms_norm
from m3_hw.ops import dense_attention as _dense_attention
from m3_hw.ops import dequantize_mxfp8 as _dequantize_mxfp8
from m3_hw.ops import gemm_fp8 as _gemm_fp8
from m3_hw.ops import grouped_gemm as _grouped_gemm
from m3_hw.ops import moe_experts as _moe_experts
from m3_hw.ops import permute_tokens as _permute_tokens
from m3_hw.ops import qk_norm_rope as _qk_norm_rope
from m3_hw.ops import quantize_fp8 as _quantize_fp8
from m3_hw.ops import rms_norm as _rms_norm
from m3_hw.ops import rope as _rope
from m3_hw.ops import route_tokens as _route_tokens
from m3_hw.ops import select_blocks as _select_blocks
from m3_hw.ops import sparse_attention as _sparse_attention
from m3_hw.ops import swiglu_oai as _swiglu_oai
from m3_hw.ops import unpermute_tokens as _unpermute_tokens
from m3_hw.ops import varlen_attention as _varlen_attention
from m3_hw.ops import write_kv as _write_kv

add_rms_norm = register(_add_rms_norm.SPEC)
dense_attention = register(_dense_attention.SPEC)
dequantize_mxfp8 = register(_dequantize_mxfp8.SPEC)
gemm_fp8 = register(_gemm_fp8.SPEC)
grouped_gemm = register(_grouped_gemm.SPEC)
moe_experts = register(_moe_experts.SPEC)
permute_tokens = register(_permute_tokens.SPEC)
qk_norm_rope = register(_qk_norm_rope.SPEC)
quantize_fp8 = register(_quantize_fp8.SPEC)
rms_norm = register(_rms_norm.SPEC)
rope = register(_rope.SPEC)
route_tokens = register(_route_tokens.SPEC)
select_blocks = register(_select_blocks.SPEC)
sparse_attention = register(_sparse_attention.SPEC)
swiglu_oai = register(_swiglu_oai.SPEC)
unpermute_tokens = register(_unpermute_tokens.SPEC)
varlen_attention = register(_varlen_attention.SPEC)
write_kv = register(_write_kv.SPEC)

__all__ = [
    "BackendUnavailableError",
    "BundleError",
    "Capability",
    "ContractError",
    "M3HWError",
    "NotSupportedError",
    "Selection",
    "add_rms_norm",
    "capabilities",
    "dense_attention",
    "dequantize_mxfp8",
    "gemm_fp8",
    "grouped_gemm",
    "moe_experts",
    "permute_tokens",
    "qk_norm_rope",
    "quantize_fp8",
    "rms_norm",
    "rope",
    "route_tokens",
    "select_blocks",
    "selected",
    "sparse_attention",
    "swiglu_oai",
    "unpermute_tokens",
    "use_backend",
    "varlen_attention",
    "why_not",
    "write_kv",
]

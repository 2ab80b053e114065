"""Kernels for LLM inference: attention, KV indices, norms, rope, expert routing, sampling and packed linears, one schema per op and several
implementations of it.

Importing the package does not import torch; the first function used does. `gristmill_kernels._host` needs no torch at all.
"""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gristmill_kernels._distributions import refuse_two_variants

if TYPE_CHECKING:
    from gristmill_kernels._capabilities import capabilities as capabilities
    from gristmill_kernels.activation import gelu_and_mul as gelu_and_mul
    from gristmill_kernels.activation import gelu_tanh_and_mul as gelu_tanh_and_mul
    from gristmill_kernels.activation import silu_and_mul as silu_and_mul
    from gristmill_kernels.activation import swiglu_oai as swiglu_oai
    from gristmill_kernels.attention import DecodePlan as DecodePlan
    from gristmill_kernels.attention import decode_attention as decode_attention
    from gristmill_kernels.attention import decode_workspace_size as decode_workspace_size
    from gristmill_kernels.attention import extend_attention as extend_attention
    from gristmill_kernels.attention import max_decode_items as max_decode_items
    from gristmill_kernels.attention import merge_state as merge_state
    from gristmill_kernels.attention import merge_states as merge_states
    from gristmill_kernels.attention import plan_decode as plan_decode
    from gristmill_kernels.attention import ragged_attention as ragged_attention
    from gristmill_kernels.gemm import PackedLinear as PackedLinear
    from gristmill_kernels.gemm import linear as linear
    from gristmill_kernels.gemm import pack_linear as pack_linear
    from gristmill_kernels.gemm import packed_weight_size as packed_weight_size
    from gristmill_kernels.gemm import skinny_linear as skinny_linear
    from gristmill_kernels.indices import alloc_decode as alloc_decode
    from gristmill_kernels.indices import alloc_extend as alloc_extend
    from gristmill_kernels.indices import draft_kv_indices as draft_kv_indices
    from gristmill_kernels.indices import kv_indices as kv_indices
    from gristmill_kernels.indices import last_page_len as last_page_len
    from gristmill_kernels.indices import mla_indices as mla_indices
    from gristmill_kernels.indices import page_table as page_table
    from gristmill_kernels.indices import qo_indptr as qo_indptr
    from gristmill_kernels.indices import window_kv_indices as window_kv_indices
    from gristmill_kernels.indices import write_req_to_token as write_req_to_token
    from gristmill_kernels.kvcache import copy_slots as copy_slots
    from gristmill_kernels.kvcache import store_kv as store_kv
    from gristmill_kernels.kvcache import transfer_kv as transfer_kv
    from gristmill_kernels.mla import mla_decode as mla_decode
    from gristmill_kernels.mla import mla_store as mla_store
    from gristmill_kernels.moe import align_block_size as align_block_size
    from gristmill_kernels.moe import grouped_topk as grouped_topk
    from gristmill_kernels.moe import max_expert_blocks as max_expert_blocks
    from gristmill_kernels.moe import topk_sigmoid as topk_sigmoid
    from gristmill_kernels.moe import topk_softmax as topk_softmax
    from gristmill_kernels.norm import fused_add_rms_norm as fused_add_rms_norm
    from gristmill_kernels.norm import gemma_fused_add_rms_norm as gemma_fused_add_rms_norm
    from gristmill_kernels.norm import gemma_rms_norm as gemma_rms_norm
    from gristmill_kernels.norm import layer_norm as layer_norm
    from gristmill_kernels.norm import rms_norm as rms_norm
    from gristmill_kernels.quant import per_group_quant_fp8 as per_group_quant_fp8
    from gristmill_kernels.quant import per_token_quant_fp8 as per_token_quant_fp8
    from gristmill_kernels.quant import per_token_quant_int8 as per_token_quant_int8
    from gristmill_kernels.quant import quant_fp8 as quant_fp8
    from gristmill_kernels.rope import apply_rope as apply_rope
    from gristmill_kernels.rope import apply_rope_store_kv as apply_rope_store_kv
    from gristmill_kernels.sampling import apply_logit_bias as apply_logit_bias
    from gristmill_kernels.sampling import apply_penalties as apply_penalties
    from gristmill_kernels.sampling import apply_token_bitmask as apply_token_bitmask
    from gristmill_kernels.sampling import greedy as greedy
    from gristmill_kernels.sampling import sample as sample

try:  # written by the build
    from gristmill_kernels._build_info import VERSION as __version__
except ImportError:
    __version__ = "0.0.0+source"

_HOME = {
    "capabilities": "_capabilities",
    "gelu_and_mul": "activation",
    "gelu_tanh_and_mul": "activation",
    "silu_and_mul": "activation",
    "swiglu_oai": "activation",
    "DecodePlan": "attention",
    "decode_attention": "attention",
    "decode_workspace_size": "attention",
    "extend_attention": "attention",
    "max_decode_items": "attention",
    "merge_state": "attention",
    "merge_states": "attention",
    "plan_decode": "attention",
    "ragged_attention": "attention",
    "PackedLinear": "gemm",
    "linear": "gemm",
    "pack_linear": "gemm",
    "packed_weight_size": "gemm",
    "skinny_linear": "gemm",
    "alloc_decode": "indices",
    "alloc_extend": "indices",
    "draft_kv_indices": "indices",
    "kv_indices": "indices",
    "last_page_len": "indices",
    "mla_indices": "indices",
    "page_table": "indices",
    "qo_indptr": "indices",
    "window_kv_indices": "indices",
    "write_req_to_token": "indices",
    "copy_slots": "kvcache",
    "store_kv": "kvcache",
    "transfer_kv": "kvcache",
    "mla_decode": "mla",
    "mla_store": "mla",
    "align_block_size": "moe",
    "grouped_topk": "moe",
    "max_expert_blocks": "moe",
    "topk_sigmoid": "moe",
    "topk_softmax": "moe",
    "fused_add_rms_norm": "norm",
    "gemma_fused_add_rms_norm": "norm",
    "gemma_rms_norm": "norm",
    "layer_norm": "norm",
    "rms_norm": "norm",
    "per_group_quant_fp8": "quant",
    "per_token_quant_fp8": "quant",
    "per_token_quant_int8": "quant",
    "quant_fp8": "quant",
    "apply_rope": "rope",
    "apply_rope_store_kv": "rope",
    "apply_logit_bias": "sampling",
    "apply_penalties": "sampling",
    "apply_token_bitmask": "sampling",
    "greedy": "sampling",
    "sample": "sampling",
}
_FAMILIES_OF_FUNCTIONS = frozenset(
    ("activation", "attention", "gemm", "indices", "kvcache", "mla", "moe", "norm", "quant", "rope", "sampling")
)

__all__ = sorted(_HOME)

refuse_two_variants(Path(__file__).parent.parent)


def __getattr__(name: str) -> Any:
    if name in _FAMILIES_OF_FUNCTIONS or name in ("dispatch", "schema"):
        return import_module(f"{__name__}.{name}")
    home = _HOME.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = globals()[name] = getattr(import_module(f"{__name__}.{home}"), name)
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_HOME, *_FAMILIES_OF_FUNCTIONS])

"""Reference implementations in plain PyTorch, computed in float64 and rounded once: the numeric contract every other family is tested
against. Written to be read, not to be fast."""

from __future__ import annotations

from collections.abc import Callable

from gristmill_kernels import dispatch
from gristmill_kernels.reference import activation, attention, gemm, indices, kvcache, mla, moe, norm, quant, rope, sampling

_KERNELS: dict[str, Callable[..., None]] = {
    "rms_norm": norm.rms_norm,
    "fused_add_rms_norm": norm.fused_add_rms_norm,
    "gemma_rms_norm": norm.gemma_rms_norm,
    "gemma_fused_add_rms_norm": norm.gemma_fused_add_rms_norm,
    "layer_norm": norm.layer_norm,
    "apply_rope": rope.apply_rope,
    "apply_rope_store_kv": rope.apply_rope_store_kv,
    "silu_and_mul": activation.silu_and_mul,
    "gelu_and_mul": activation.gelu_and_mul,
    "gelu_tanh_and_mul": activation.gelu_tanh_and_mul,
    "swiglu_oai": activation.swiglu_oai,
    "store_kv": kvcache.store_kv,
    "copy_slots": kvcache.copy_slots,
    "transfer_kv": kvcache.transfer_kv,
    "kv_indices": indices.kv_indices,
    "qo_indptr": indices.qo_indptr,
    "write_req_to_token": indices.write_req_to_token,
    "window_kv_indices": indices.window_kv_indices,
    "page_table": indices.page_table,
    "last_page_len": indices.last_page_len,
    "mla_indices": indices.mla_indices,
    "draft_kv_indices": indices.draft_kv_indices,
    "alloc_extend": indices.alloc_extend,
    "alloc_decode": indices.alloc_decode,
    "decode_attention": attention.decode_attention,
    "extend_attention": attention.extend_attention,
    "ragged_attention": attention.ragged_attention,
    "merge_state": attention.merge_state,
    "merge_states": attention.merge_states,
    "mla_decode": mla.mla_decode,
    "mla_store": mla.mla_store,
    "greedy": sampling.greedy,
    "sample": sampling.sample,
    "apply_logit_bias": sampling.apply_logit_bias,
    "apply_penalties": sampling.apply_penalties,
    "apply_token_bitmask": sampling.apply_token_bitmask,
    "pack_weight": gemm.pack_weight,
    "packed_linear": gemm.packed_linear,
    "skinny_linear": gemm.skinny_linear,
    "topk_softmax": moe.topk_softmax,
    "topk_sigmoid": moe.topk_sigmoid,
    "grouped_topk": moe.grouped_topk,
    "align_block_size": moe.align_block_size,
    "quant_fp8": quant.quant_fp8,
    "per_token_quant_fp8": quant.per_token_quant_fp8,
    "per_token_quant_int8": quant.per_token_quant_int8,
    "per_group_quant_fp8": quant.per_group_quant_fp8,
}


def register() -> None:
    """Make every op available in plain PyTorch, on every device and for every key."""
    for name, kernel in _KERNELS.items():
        dispatch.implement(name, "reference", lambda key: None, kernel)

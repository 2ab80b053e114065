"""Reference implementations in plain PyTorch, computed in float64 and rounded once: the numeric contract every other family is tested
against. Written to be read, not to be fast."""

from __future__ import annotations

from collections.abc import Callable

from gristmill_kernels import dispatch
from gristmill_kernels.reference import activation, attention, gemm, indices, kvcache, norm, rope, sampling

_KERNELS: dict[str, Callable[..., None]] = {
    "rms_norm": norm.rms_norm,
    "fused_add_rms_norm": norm.fused_add_rms_norm,
    "apply_rope": rope.apply_rope,
    "silu_and_mul": activation.silu_and_mul,
    "store_kv": kvcache.store_kv,
    "kv_indices": indices.kv_indices,
    "qo_indptr": indices.qo_indptr,
    "write_req_to_token": indices.write_req_to_token,
    "decode_attention": attention.decode_attention,
    "extend_attention": attention.extend_attention,
    "merge_state": attention.merge_state,
    "greedy": sampling.greedy,
    "sample": sampling.sample,
    "apply_logit_bias": sampling.apply_logit_bias,
    "apply_penalties": sampling.apply_penalties,
    "pack_weight": gemm.pack_weight,
    "packed_linear": gemm.packed_linear,
}


def register() -> None:
    """Make every op available in plain PyTorch, on every device and for every key."""
    for name, kernel in _KERNELS.items():
        dispatch.implement(name, "reference", lambda key: None, kernel)

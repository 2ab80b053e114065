"""Multi-head latent attention in its absorbed form: one KV head whose values are the first part of its keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels.reference.attention import extend_attention
from gristmill_kernels.reference.kvcache import _bytes as as_bytes
from gristmill_kernels.reference.kvcache import _quantised as quantised


def mla_decode(
    out: Tensor,
    lse: Tensor | None,
    q_nope: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    plan: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    kv_scale: float,
) -> None:
    # The plan only spreads the work.
    if qo_indptr is None:
        qo_indptr = torch.arange(q_nope.shape[0] + 1, dtype=torch.int32)
    q = torch.cat([q_nope, q_rope], dim=-1)
    keys = kv_cache[:, None]
    extend_attention(
        out, lse, q, keys, keys[..., : q_nope.shape[-1]], qo_indptr, kv_indptr, kv_indices, None, None, None,
        True, sm_scale, 0.0, -1, kv_scale, kv_scale,
    )  # fmt: skip


def mla_store(kv_cache: Tensor, kv_c: Tensor, k_rope: Tensor, slots: Tensor, kv_scale: float) -> None:
    if slots.numel() and int(slots.max()) >= kv_cache.shape[0]:
        raise RuntimeError(f"mla_store: slots holds {int(slots.max())}, but the cache has {kv_cache.shape[0]} slots")
    kept = slots >= 0
    rows = torch.cat([kv_c, k_rope], dim=-1)[kept]
    as_bytes(kv_cache)[slots[kept].long()] = quantised(rows, kv_scale, kv_cache.dtype)

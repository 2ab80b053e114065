"""Rotary position embedding."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_vector, is_dense, refuse_device, refuse_dtype, refuse_shape, same_device
from gristmill_kernels.schema import rope_key


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, *, is_neox: bool = True) -> None:
    """Rotate the first `rotary_dim` elements of every query and key head in place.

    Args:
        q: [T, Hq, D] float32, float16 or bfloat16; may be a slice of a packed qkv tensor.
        k: [T, Hkv, D], dtype of q.
        positions: [T] int32; a row whose position lies outside the table (padding, -1) is left as it is.
        cos_sin_cache: [P, rotary_dim] float32, contiguous rows: rotary_dim / 2 cosines, then as many sines; rotary_dim even and <= D.
            Scaled variants (llama3, yarn, ...) differ only in this table.
        is_neox: pair element i with i + rotary_dim / 2 (Llama, Qwen); otherwise 2i with 2i + 1 (GPT-J).

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Su et al., "RoFormer" (2021), eq. 34.
    """
    check_float("apply_rope", "q", q)
    check_float("apply_rope", "k", k)
    q_shape, k_shape, table_shape = q.shape, k.shape, cos_sin_cache.shape
    if len(q_shape) != 3:
        raise refuse_shape("apply_rope", "q", q, "[T, Hq, D]")
    num_tokens, _, head_dim = q_shape
    if len(k_shape) != 3 or k_shape[0] != num_tokens or k_shape[2] != head_dim:
        raise refuse_shape("apply_rope", "k", k, f"[{num_tokens}, Hkv, {head_dim}] like q")
    if k.dtype is not q.dtype:
        raise refuse_dtype("apply_rope", "k", k, "the dtype of q")
    if not same_device(k, q):
        raise refuse_device("apply_rope", "k", k, q)
    check_vector("apply_rope", "positions", positions, torch.int32, num_tokens, q, "[T]")
    if cos_sin_cache.dtype is not torch.float32:
        raise refuse_dtype("apply_rope", "cos_sin_cache", cos_sin_cache, "float32")
    if len(table_shape) != 2 or table_shape[1] % 2 or not 0 < table_shape[1] <= head_dim or not is_dense(cos_sin_cache):
        right = f"[P, rotary_dim] with contiguous rows, rotary_dim even and <= {head_dim}"
        raise refuse_shape("apply_rope", "cos_sin_cache", cos_sin_cache, right)
    if table_shape[0] == 0:
        raise refuse_shape("apply_rope", "cos_sin_cache", cos_sin_cache, "at least one position long")
    if not same_device(cos_sin_cache, q):
        raise refuse_device("apply_rope", "cos_sin_cache", cos_sin_cache, q)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_rope(q, k, positions, cos_sin_cache, is_neox)
    else:
        select("apply_rope", rope_key(q, cos_sin_cache))(q, k, positions, cos_sin_cache, is_neox)

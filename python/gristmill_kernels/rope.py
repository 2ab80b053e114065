"""Rotary position embedding, alone and together with the store of the rotated keys."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_vector, is_dense, refuse_device, refuse_dtype, refuse_shape, same_device
from gristmill_kernels.kvcache import check_store
from gristmill_kernels.schema import rope_key, rope_store_key


def _check_rope(function: str, q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor) -> None:
    check_float(function, "q", q)
    check_float(function, "k", k)
    q_shape, k_shape, table_shape = q.shape, k.shape, cos_sin_cache.shape
    if len(q_shape) != 3:
        raise refuse_shape(function, "q", q, "[T, Hq, D]")
    num_tokens, _, head_dim = q_shape
    if len(k_shape) != 3 or k_shape[0] != num_tokens or k_shape[2] != head_dim:
        raise refuse_shape(function, "k", k, f"[{num_tokens}, Hkv, {head_dim}] like q")
    if k.dtype is not q.dtype:
        raise refuse_dtype(function, "k", k, "the dtype of q")
    if not same_device(k, q):
        raise refuse_device(function, "k", k, q)
    check_vector(function, "positions", positions, torch.int32, num_tokens, q, "[T]")
    if cos_sin_cache.dtype is not torch.float32:
        raise refuse_dtype(function, "cos_sin_cache", cos_sin_cache, "float32")
    if len(table_shape) != 2 or table_shape[1] % 2 or not 0 < table_shape[1] <= head_dim or not is_dense(cos_sin_cache):
        right = f"[P, rotary_dim] with contiguous rows, rotary_dim even and <= {head_dim}"
        raise refuse_shape(function, "cos_sin_cache", cos_sin_cache, right)
    if table_shape[0] == 0:
        raise refuse_shape(function, "cos_sin_cache", cos_sin_cache, "at least one position long")
    if not same_device(cos_sin_cache, q):
        raise refuse_device(function, "cos_sin_cache", cos_sin_cache, q)


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
    _check_rope("apply_rope", q, k, positions, cos_sin_cache)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_rope(q, k, positions, cos_sin_cache, is_neox)
    else:
        select("apply_rope", rope_key(q, cos_sin_cache))(q, k, positions, cos_sin_cache, is_neox)


def apply_rope_store_kv(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    positions: Tensor,
    slots: Tensor,
    cos_sin_cache: Tensor,
    *,
    is_neox: bool = True,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    """In one launch, and with the same bits, `apply_rope(q, k, ...)` and then `store_kv(k, v, ...)`.

    A row whose position lies outside the table is stored unrotated; a row whose slot is negative is rotated and not stored.

    Args:
        q: [T, Hq, D] float32, float16 or bfloat16; rotated in place. May be a slice of a packed qkv tensor, as may k and v.
        k: [T, Hkv, D], dtype of q; rotated in place, rounded to its dtype, and then stored.
        v: [T, Hkv, Dv], dtype of q.
        k_cache: [S, Hkv, D], dtype of q, float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        v_cache: [S, Hkv, Dv], dtype of k_cache.
        positions: [T] int32.
        slots: [T] int32, each in [-1, S); no slot twice. A slot >= S is an error or skipped, never written.
        cos_sin_cache: [P, rotary_dim] float32, as in `apply_rope`.
        is_neox: pair element i with i + rotary_dim / 2; otherwise 2i with 2i + 1.
        k_scale: what a stored key is worth, as in `store_kv`.
        v_scale: the same for values.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, device or scale that does not fit, in one sentence.

    Source: Su et al. 2021, eq. 34; the fusion is that of FlashInfer's and SGLang's rope kernels with a KV buffer.
    """
    _check_rope("apply_rope_store_kv", q, k, positions, cos_sin_cache)
    check_store("apply_rope_store_kv", k, v, k_cache, v_cache, slots, k_scale, v_scale)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.apply_rope_store_kv(q, k, k_cache, v_cache, v, positions, cos_sin_cache, slots, is_neox, k_scale, v_scale)
    else:
        op = select("apply_rope_store_kv", rope_store_key(q, k_cache, cos_sin_cache))
        op(q, k, k_cache, v_cache, v, positions, cos_sin_cache, slots, is_neox, k_scale, v_scale)

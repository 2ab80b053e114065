"""Multi-head latent attention (DeepSeek-V2/V3, Kimi K2) in its absorbed form: the cache holds one latent vector and one rope key per token,
shared by all heads; the latent vector is key and value at once."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._plan import DecodePlan
from gristmill_kernels._registry import select
from gristmill_kernels.attention import _check_plan, _check_rows
from gristmill_kernels.checks import (
    check_cache,
    check_float,
    check_vector,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_value,
    same_device,
)
from gristmill_kernels.schema import device_of, store_key

__all__ = ["mla_decode", "mla_store"]


def mla_decode(
    q_nope: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    sm_scale: float,
    qo_indptr: Tensor | None = None,
    kv_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Absorbed latent attention of one or a few query rows per request over the request's slots (split-KV).

    With c the first L and r the last R elements of a cache row, both times kv_scale, head h of a row computes
    `softmax(sm_scale * (q_nope[h] . c_j + q_rope[h] . r_j)) @ c`. Row i of q_len rows sits at position `kv_len - q_len + i` and sees no key
    behind it.

    Args:
        q_nope: [T, Hq, L] float32, float16 or bfloat16: queries times the key half of kv_b_proj; L = 512 in DeepSeek's models.
        q_rope: [T, Hq, R], dtype of q_nope, rotated; R = 64. Both may be slices of one tensor.
        kv_cache: [S, L + R], dtype of q_nope or float8_e4m3fn, float8_e5m2, float8_e4m3fnuz; rows written by `mla_store`.
        kv_indptr: [B + 1] int32; request b attends to `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
        kv_indices: int32 slots in order of position; a negative entry is a hole that nobody sees.
        sm_scale: factor of the logits. It has no default: 1 / sqrt of the head width before absorption (192), times what yarn asks for.
        qo_indptr: [B + 1] int32, rows of request b are `[qo_indptr[b], qo_indptr[b + 1])`, for verifying drafted tokens; when None every
            request has one row and T = B.
        kv_scale: factor of the cached rows, which `mla_store` divided by it.
        out: [T, Hq, L], dtype of q_nope; still to be multiplied by the value half of kv_b_proj. Allocated when None.
        lse: [T, Hq] float32, written when given: natural logarithm of the softmax denominator.
        plan: what `plan_decode(kv_indptr, Hq, 1, L, ...)` made, with max_q_len at least the largest q_len; only the spread of work depends
            on it, never the result.

    Returns:
        `out`. A row is the same bit for bit whatever its neighbours, its place among several query rows, the plan or the threads. A row
        without keys gives 0 and LSE -inf.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.2 and appendix C.
    """
    function = "mla_decode"
    check_float(function, "q_nope", q_nope)
    check_float(function, "q_rope", q_rope)
    dtype = q_nope.dtype
    check_cache(function, "kv_cache", kv_cache, dtype, "the dtype of q_nope")
    if q_nope.ndim != 3:
        raise refuse_shape(function, "q_nope", q_nope, "[T, Hq, L]")
    num_rows, num_heads, latent_dim = q_nope.shape
    if q_rope.ndim != 3 or q_rope.shape[:2] != (num_rows, num_heads):
        raise refuse_shape(function, "q_rope", q_rope, f"[{num_rows}, {num_heads}, R] like q_nope")
    if q_rope.dtype is not dtype:
        raise refuse_dtype(function, "q_rope", q_rope, "the dtype of q_nope")
    rope_dim = q_rope.shape[2]
    if kv_cache.ndim != 2 or kv_cache.shape[1] != latent_dim + rope_dim:
        raise refuse_shape(function, "kv_cache", kv_cache, f"[S, {latent_dim + rope_dim}], as wide as q_nope and q_rope")
    for argument, tensor in (("q_rope", q_rope), ("kv_cache", kv_cache)):
        if not same_device(tensor, q_nope):
            raise refuse_device(function, argument, tensor, q_nope)
    if qo_indptr is None:
        check_vector(function, "kv_indptr", kv_indptr, torch.int32, num_rows + 1, q_nope, "[B + 1]")
    else:
        check_vector(function, "qo_indptr", qo_indptr, torch.int32, None, q_nope, "[B + 1]")
        check_vector(function, "kv_indptr", kv_indptr, torch.int32, qo_indptr.shape[0], q_nope, "[B + 1] like qo_indptr")
    check_vector(function, "kv_indices", kv_indices, torch.int32, None, q_nope, "one-dimensional")
    out = _check_rows(function, q_nope, latent_dim, None, out, lse)
    schedule = workspace = None
    if plan is not None:
        schedule, workspace = _check_plan(
            function, plan, q_nope, kv_indptr.shape[0] - 1, latent_dim, -1, several_rows=qo_indptr is not None
        )
    key = (device_of(q_nope), dtype, kv_cache.dtype, latent_dim, rope_dim, num_heads)
    op = torch.ops.gristmill.mla_decode if torch.compiler.is_compiling() else select(function, key)
    op(out, lse, q_nope, q_rope, kv_cache, qo_indptr, kv_indptr, kv_indices, schedule, workspace, sm_scale, kv_scale)
    return out


def mla_store(kv_c: Tensor, k_rope: Tensor, kv_cache: Tensor, slots: Tensor, *, kv_scale: float = 1.0) -> None:
    """Write latent vectors and rope keys, divided by kv_scale, to slots of the latent cache; a negative slot (padding) is skipped.

    Args:
        kv_c: [T, L] float32, float16 or bfloat16, normalised latent vectors; L = 512 in DeepSeek's models.
        k_rope: [T, R], dtype of kv_c, rotated; R = 64. Both may be slices of one tensor.
        kv_cache: [S, L + R], dtype of kv_c or float8_e4m3fn, float8_e5m2, float8_e4m3fnuz: then the float32 quotient is rounded to nearest
            even and saturates at the largest finite number; a NaN stays one.
        slots: [T] int32, each in [-1, S); no slot twice. A slot >= S is an error or skipped, never written.
        kv_scale: what the rows are divided by, positive; pass the same to `mla_decode`.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.3: the cache of one token is its latent vector and its rope key.
    """
    function = "mla_store"
    check_float(function, "kv_c", kv_c)
    check_float(function, "k_rope", k_rope)
    check_cache(function, "kv_cache", kv_cache, kv_c.dtype, "the dtype of kv_c")
    if kv_c.ndim != 2:
        raise refuse_shape(function, "kv_c", kv_c, "[T, L]")
    num_tokens, latent_dim = kv_c.shape
    if k_rope.ndim != 2 or k_rope.shape[0] != num_tokens:
        raise refuse_shape(function, "k_rope", k_rope, f"[{num_tokens}, R] like kv_c")
    if k_rope.dtype is not kv_c.dtype:
        raise refuse_dtype(function, "k_rope", k_rope, "the dtype of kv_c")
    width = latent_dim + k_rope.shape[1]
    if kv_cache.ndim != 2 or kv_cache.shape[1] != width:
        raise refuse_shape(function, "kv_cache", kv_cache, f"[S, {width}], as wide as kv_c and k_rope")
    for argument, tensor in (("k_rope", k_rope), ("kv_cache", kv_cache)):
        if not same_device(tensor, kv_c):
            raise refuse_device(function, argument, tensor, kv_c)
    check_vector(function, "slots", slots, torch.int32, num_tokens, kv_c, "[T]")
    if not kv_scale > 0:
        raise refuse_value(function, "kv_scale", kv_scale, "positive")
    op = torch.ops.gristmill.mla_store if torch.compiler.is_compiling() else select(function, store_key(kv_c, kv_cache))
    op(kv_cache, kv_c, k_rope, slots, kv_scale)

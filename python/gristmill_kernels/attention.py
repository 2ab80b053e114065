"""Attention over a pool of KV slots addressed by CSR lists. LSE is everywhere the natural logarithm, float32; a row that sees no key
gives output 0 and LSE -inf (with sinks: the sink's logit)."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._plan import DecodePlan, decode_workspace_size, plan_decode
from gristmill_kernels._registry import select
from gristmill_kernels.checks import (
    check_float,
    check_like,
    check_vector,
    is_dense,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_value,
    same_device,
)
from gristmill_kernels.schema import device_of, norm_key

__all__ = ["DecodePlan", "decode_attention", "decode_workspace_size", "extend_attention", "merge_state", "plan_decode"]


def _check_pool(function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple:
    """Check q, k_cache and v_cache against each other; returns the dispatch key (schema.AttentionKey as a plain tuple)."""
    check_float(function, "q", q)
    check_float(function, "k_cache", k_cache)
    check_float(function, "v_cache", v_cache)
    q_shape, k_shape, v_shape = q.shape, k_cache.shape, v_cache.shape
    if len(q_shape) != 3:
        raise refuse_shape(function, "q", q, "[rows, Hq, D]")
    _, num_qo_heads, head_dim = q_shape
    if len(k_shape) != 3 or k_shape[2] != head_dim:
        raise refuse_shape(function, "k_cache", k_cache, f"[S, Hkv, {head_dim}] like q")
    num_slots, num_kv_heads, _ = k_shape
    if len(v_shape) != 3 or v_shape[0] != num_slots or v_shape[1] != num_kv_heads:
        raise refuse_shape(function, "v_cache", v_cache, f"[{num_slots}, {num_kv_heads}, Dv] like k_cache")
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads:
        raise refuse_value(function, "the number of query heads", num_qo_heads, f"a multiple of the {num_kv_heads} KV heads")
    dtype, cache_dtype = q.dtype, k_cache.dtype
    if cache_dtype is not dtype:
        raise refuse_dtype(function, "k_cache", k_cache, "the dtype of q")
    if v_cache.dtype is not dtype:
        raise refuse_dtype(function, "v_cache", v_cache, "the dtype of q")
    if not (q.is_cpu and k_cache.is_cpu and v_cache.is_cpu):
        for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
            if cache.device != q.device:
                raise refuse_device(function, argument, cache, q)
    return (device_of(q), dtype, cache_dtype, head_dim, v_shape[2], num_qo_heads, num_kv_heads)


def _check_rows(function: str, q: Tensor, head_dim_v: int, sinks: Tensor | None, out: Tensor | None, lse: Tensor | None) -> Tensor:
    """Check what has one entry per query row or head; returns `out`, allocated when None."""
    rows, heads, _ = q.shape
    if sinks is not None:
        check_vector(function, "sinks", sinks, torch.float32, heads, q, "[Hq]")
    if lse is not None:
        if lse.dtype is not torch.float32:
            raise refuse_dtype(function, "lse", lse, "float32")
        if lse.shape != (rows, heads) or not is_dense(lse):
            raise refuse_shape(function, "lse", lse, f"[rows, Hq] = ({rows}, {heads}) with contiguous rows")
        if not same_device(lse, q):
            raise refuse_device(function, "lse", lse, q)
    if out is None:
        return torch.empty((rows, heads, head_dim_v), dtype=q.dtype, device=q.device)
    check_like(function, "out", out, q, (rows, heads, head_dim_v), "[rows, Hq, Dv]")
    return out


def decode_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
    plan: DecodePlan | None = None,
) -> Tensor:
    """Attention of one query row per request over the request's slots (split-KV).

    Row b sits at position `kv_len[b] - 1` and computes `softmax(cap(q . k * sm_scale * k_scale)) @ v * v_scale`, where
    `cap(s) = logit_cap * tanh(s / logit_cap)` if logit_cap > 0, else s.

    Args:
        q: [B, Hq, D] float32, float16 or bfloat16; may be a slice of a packed qkv tensor.
        k_cache: [S, Hkv, D], dtype of q; Hq a multiple of Hkv, any ratio.
        v_cache: [S, Hkv, Dv], dtype of q; Dv may differ from D.
        kv_indptr: [B + 1] int32; request b attends to `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
        kv_indices: int32 slots in order of position; a negative entry is a hole that nobody sees.
        sm_scale: factor of the logits; 1 / sqrt(D) when None.
        logit_cap: soft cap of the scaled logits; 0 for none.
        window_left: keys more than this many positions before the row are not seen; -1 for no limit.
        sinks: [Hq] float32, one more logit per head, neither scaled nor capped, with value 0; it counts in the LSE.
        k_scale, v_scale: factors of the cached keys and values.
        out: [B, Hq, Dv], dtype of q. Allocated when None.
        lse: [B, Hq] float32, written when given: natural logarithm of the softmax denominator.
        plan: what `plan_decode` made for this kv_indptr; only the spread of work depends on it, never the result.

    Returns:
        `out`. Every list is cut at fixed positions, so a row is the same bit for bit whatever its neighbours, the plan or the threads.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., Flash-Decoding (2023).
    """
    key = _check_pool("decode_attention", q, k_cache, v_cache)
    batch, _, head_dim = q.shape
    check_vector("decode_attention", "kv_indptr", kv_indptr, torch.int32, batch + 1, q, "[B + 1]")
    check_vector("decode_attention", "kv_indices", kv_indices, torch.int32, None, q, "one-dimensional")
    out = _check_rows("decode_attention", q, key[4], sinks, out, lse)
    schedule = workspace = None
    if plan is not None:
        schedule, workspace = plan.schedule, plan.workspace
        if plan.num_requests != batch:
            raise refuse_value("decode_attention", "plan.num_requests", plan.num_requests, f"the batch of q, {batch}")
        if workspace.numel() < plan.num_items * key[5] * (key[4] + 2):
            raise refuse_shape("decode_attention", "plan.workspace", workspace, f"for {key[5]} heads of {key[4]} values, as planned")
        if not same_device(schedule, q):
            raise refuse_device("decode_attention", "plan.schedule", schedule, q)
    if sm_scale is None:
        sm_scale = head_dim**-0.5
    op = torch.ops.gristmill.decode_attention if torch.compiler.is_compiling() else select("decode_attention", key)
    op(
        out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks, schedule, workspace,
        sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip
    return out


def extend_attention(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    *,
    causal: bool = True,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of several query rows per request (prefill, chunk, verify) over prefix and own keys, all of them already in the pool.

    Row i of request b sits at position `kv_len - q_len + i`, so causal masks are aligned at the lower right. Formula and arguments as in
    `decode_attention`, and:

    Args:
        q: [T, Hq, D], the rows of all requests one after another.
        qo_indptr: [B + 1] int32, rows of request b are `q[qo_indptr[b]:qo_indptr[b + 1]]`.
        causal: a row sees no key behind its own position.
        custom_mask: flat bool, True where row i of request b sees key j, at `mask_indptr[b] + i * kv_len[b] + j`. It replaces the causal
            mask (as in FlashInfer); a window still applies.
        mask_indptr: [B + 1] int32, where each request's mask begins; needed with custom_mask.
        out: [T, Hq, Dv]. Allocated when None.
        lse: [T, Hq] float32, written when given.

    Returns:
        `out`; rows do not depend on how a prompt was cut into chunks.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Dao, "FlashAttention-2" (2023).
    """
    key = _check_pool("extend_attention", q, k_cache, v_cache)
    check_vector("extend_attention", "qo_indptr", qo_indptr, torch.int32, None, q, "[B + 1]")
    check_vector("extend_attention", "kv_indptr", kv_indptr, torch.int32, qo_indptr.shape[0], q, "[B + 1] like qo_indptr")
    check_vector("extend_attention", "kv_indices", kv_indices, torch.int32, None, q, "one-dimensional")
    if (custom_mask is None) != (mask_indptr is None):
        missing = "mask_indptr" if mask_indptr is None else "custom_mask"
        raise refuse_value("extend_attention", missing, None, "given, since custom_mask and mask_indptr go together")
    if custom_mask is not None and mask_indptr is not None:
        check_vector("extend_attention", "custom_mask", custom_mask, torch.bool, None, q, "one-dimensional")
        check_vector("extend_attention", "mask_indptr", mask_indptr, torch.int32, qo_indptr.shape[0], q, "[B + 1]")
    out = _check_rows("extend_attention", q, key[4], sinks, out, lse)
    if sm_scale is None:
        sm_scale = q.shape[2] ** -0.5
    op = torch.ops.gristmill.extend_attention if torch.compiler.is_compiling() else select("extend_attention", key)
    op(
        out, lse, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, sinks,
        causal, sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip
    return out


def merge_state(
    o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor, *, out: Tensor | None = None, lse: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Combine two partial attention results over disjoint keys into the result over their union.

    Args:
        o_a, o_b: [T, H, D] normalised outputs, float32, float16 or bfloat16.
        lse_a, lse_b: [T, H] float32, natural logarithm.
        out: [T, H, D], dtype of o_a; may be o_a or o_b. Allocated when None.
        lse: [T, H] float32; may be lse_a or lse_b. Allocated when None.

    Returns:
        `(out, lse)`. Two empty states (LSE -inf) give 0 and -inf; if one is empty the other comes out bit for bit, whatever the empty
        output held.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Liu et al., "Ring Attention" (2023); FlashInfer's recursive attention states.
    """
    check_float("merge_state", "o_a", o_a)
    if o_a.ndim != 3:
        raise refuse_shape("merge_state", "o_a", o_a, "[T, H, D]")
    shape = o_a.shape
    check_like("merge_state", "o_b", o_b, o_a, shape, "the shape of o_a")
    rows = shape[:2]
    if out is None:
        out = torch.empty(shape, dtype=o_a.dtype, device=o_a.device)
    else:
        check_like("merge_state", "out", out, o_a, shape, "the shape of o_a")
    if lse is None:
        lse = torch.empty(rows, dtype=torch.float32, device=o_a.device)
    for argument, tensor in (("lse_a", lse_a), ("lse_b", lse_b), ("lse", lse)):
        if tensor.dtype is not torch.float32:
            raise refuse_dtype("merge_state", argument, tensor, "float32")
        if tensor.shape != rows or not is_dense(tensor):
            raise refuse_shape("merge_state", argument, tensor, f"[T, H] = {tuple(rows)} with contiguous rows")
        if not same_device(tensor, o_a):
            raise refuse_device("merge_state", argument, tensor, o_a)
    op = torch.ops.gristmill.merge_state if torch.compiler.is_compiling() else select("merge_state", norm_key(o_a))
    op(out, lse, o_a, lse_a, o_b, lse_b)
    return out, lse

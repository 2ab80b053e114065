"""Attention over a pool of KV slots addressed by CSR lists, or over contiguous keys, and merges of partial results. LSE is everywhere the
natural logarithm, float32; a row that sees no key gives output 0 and LSE -inf (with sinks: the sink's logit)."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._plan import DecodePlan, decode_workspace_size, max_decode_items, plan_decode
from gristmill_kernels._registry import select
from gristmill_kernels.checks import (
    check_cache,
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

__all__ = [
    "DecodePlan",
    "decode_attention",
    "decode_workspace_size",
    "extend_attention",
    "max_decode_items",
    "merge_state",
    "merge_states",
    "plan_decode",
    "ragged_attention",
]


def _check_pool(function: str, q: Tensor, k_cache: Tensor, v_cache: Tensor) -> tuple:
    """Check q, k_cache and v_cache against each other; returns the dispatch key (schema.AttentionKey as a plain tuple)."""
    check_float(function, "q", q)
    dtype, cache_dtype = q.dtype, k_cache.dtype
    check_cache(function, "k_cache", k_cache, dtype, "the dtype of q")
    check_cache(function, "v_cache", v_cache, dtype, "the dtype of q")
    q_shape, k_shape, v_shape = q.shape, k_cache.shape, v_cache.shape
    if len(q_shape) != 3:
        raise refuse_shape(function, "q", q, "[rows, Hq, D]")
    _, num_qo_heads, head_dim = q_shape
    if len(k_shape) != 3 or k_shape[2] != head_dim:
        raise refuse_shape(function, "k_cache", k_cache, f"[S, Hkv, {head_dim}] like q")
    num_slots, num_kv_heads, _ = k_shape
    if len(v_shape) != 3 or v_shape[0] != num_slots or v_shape[1] != num_kv_heads:
        raise refuse_shape(function, "v_cache", v_cache, f"[{num_slots}, {num_kv_heads}, Dv] like k_cache")
    if v_cache.dtype is not cache_dtype:
        raise refuse_dtype(function, "v_cache", v_cache, "the dtype of k_cache")
    _check_heads_and_devices(function, q, num_kv_heads, (("k_cache", k_cache), ("v_cache", v_cache)))
    return (device_of(q), dtype, cache_dtype, head_dim, v_shape[2], num_qo_heads, num_kv_heads)


def _check_heads_and_devices(function: str, q: Tensor, num_kv_heads: int, others: tuple[tuple[str, Tensor], tuple[str, Tensor]]) -> None:
    num_qo_heads = q.shape[1]
    if num_kv_heads == 0 or num_qo_heads % num_kv_heads:
        raise refuse_value(function, "the number of query heads", num_qo_heads, f"a multiple of the {num_kv_heads} KV heads")
    for argument, tensor in others:
        if not (q.is_cpu and tensor.is_cpu) and tensor.device != q.device:
            raise refuse_device(function, argument, tensor, q)


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


def _check_mask(function: str, q: Tensor, qo_indptr: Tensor, custom_mask: Tensor | None, mask_indptr: Tensor | None) -> None:
    if (custom_mask is None) != (mask_indptr is None):
        missing = "mask_indptr" if mask_indptr is None else "custom_mask"
        raise refuse_value(function, missing, None, "given, since custom_mask and mask_indptr go together")
    if custom_mask is not None and mask_indptr is not None:
        check_vector(function, "custom_mask", custom_mask, torch.bool, None, q, "one-dimensional")
        check_vector(function, "mask_indptr", mask_indptr, torch.int32, qo_indptr.shape[0], q, "[B + 1]")


def _check_plan(
    function: str, plan: DecodePlan, q: Tensor, num_requests: int, head_dim_v: int, window_left: int, several_rows: bool
) -> tuple[Tensor, Tensor]:
    """The schedule and workspace of a plan that fits the call."""
    schedule, workspace, num_heads = plan.schedule, plan.workspace, q.shape[1]
    if plan.num_requests != num_requests:
        raise refuse_value(function, "plan.num_requests", plan.num_requests, f"the batch of the call, {num_requests}")
    if plan.max_q_len != 1 and not several_rows:
        raise refuse_value(function, "plan.max_q_len", plan.max_q_len, "1 for one query row per request")
    if plan.window_left >= 0 and not 0 <= window_left <= plan.window_left:
        raise refuse_value(function, "window_left", window_left, f"from 0 to {plan.window_left}, the window that was planned for")
    if workspace.numel() < plan.max_items * plan.max_q_len * num_heads * (head_dim_v + 2):
        raise refuse_shape(function, "plan.workspace", workspace, f"for {num_heads} heads of {head_dim_v} values, as planned")
    if not same_device(schedule, q):
        raise refuse_device(function, "plan.schedule", schedule, q)
    return schedule, workspace


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
        k_cache: [S, Hkv, D], dtype of q or float8_e4m3fn, float8_e5m2, float8_e4m3fnuz; Hq a multiple of Hkv, any ratio.
        v_cache: [S, Hkv, Dv], dtype of k_cache; Dv may differ from D.
        kv_indptr: [B + 1] int32; request b attends to `kv_indices[kv_indptr[b]:kv_indptr[b + 1]]`.
        kv_indices: int32 slots in order of position; a negative entry is a hole that nobody sees.
        sm_scale: factor of the logits; 1 / sqrt(D) when None.
        logit_cap: soft cap of the scaled logits; 0 for none.
        window_left: keys more than this many positions before the row are not seen; -1 for no limit.
        sinks: [Hq] float32, one more logit per head, neither scaled nor capped, with value 0; it counts in the LSE.
        k_scale, v_scale: factors of the cached keys and values, which `store_kv` divided by them.
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
        schedule, workspace = _check_plan("decode_attention", plan, q, batch, key[4], window_left, several_rows=False)
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
    _check_mask("extend_attention", q, qo_indptr, custom_mask, mask_indptr)
    out = _check_rows("extend_attention", q, key[4], sinks, out, lse)
    if sm_scale is None:
        sm_scale = q.shape[2] ** -0.5
    op = torch.ops.gristmill.extend_attention if torch.compiler.is_compiling() else select("extend_attention", key)
    op(
        out, lse, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, sinks,
        causal, sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip
    return out


def ragged_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    *,
    causal: bool = True,
    custom_mask: Tensor | None = None,
    mask_indptr: Tensor | None = None,
    sm_scale: float | None = None,
    logit_cap: float = 0.0,
    window_left: int = -1,
    sinks: Tensor | None = None,
    out: Tensor | None = None,
    lse: Tensor | None = None,
) -> Tensor:
    """Attention of the query rows of each request over its own contiguous keys and values (varlen; no pool).

    Formula, masks and positions as in `extend_attention`: row i of request b sits at position `kv_len - q_len + i`.

    Args:
        q: [T, Hq, D] float32, float16 or bfloat16; q, k and v may be slices of one packed tensor.
        k: [N, Hkv, D], dtype of q; Hq a multiple of Hkv, any ratio.
        v: [N, Hkv, Dv], dtype of q; Dv may differ from D (192 and 128 in DeepSeek's prefill).
        qo_indptr: [B + 1] int32, rows of request b are `q[qo_indptr[b]:qo_indptr[b + 1]]`.
        kv_indptr: [B + 1] int32, its keys are `k[kv_indptr[b]:kv_indptr[b + 1]]`.
        causal: a row sees no key behind its own position.
        custom_mask: flat bool, True where row i of request b sees key j, at `mask_indptr[b] + i * kv_len[b] + j`. It replaces the causal
            mask; a window still applies.
        mask_indptr: [B + 1] int32, where each request's mask begins; needed with custom_mask.
        sm_scale: factor of the logits; 1 / sqrt(D) when None.
        logit_cap: soft cap of the scaled logits; 0 for none.
        window_left: keys more than this many positions before the row are not seen; -1 for no limit.
        sinks: [Hq] float32, one more logit per head, neither scaled nor capped, with value 0; it counts in the LSE.
        out: [T, Hq, Dv], dtype of q. Allocated when None.
        lse: [T, Hq] float32, written when given: natural logarithm of the softmax denominator.

    Returns:
        `out`. A row is the same bit for bit as computed by `extend_attention` over the same keys by the same implementation family.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Dao, "FlashAttention-2" (2023), varlen interface.
    """
    function = "ragged_attention"
    check_float(function, "q", q)
    check_float(function, "k", k)
    check_float(function, "v", v)
    q_shape, k_shape, v_shape = q.shape, k.shape, v.shape
    if len(q_shape) != 3:
        raise refuse_shape(function, "q", q, "[T, Hq, D]")
    if len(k_shape) != 3 or k_shape[2] != q_shape[2]:
        raise refuse_shape(function, "k", k, f"[N, Hkv, {q_shape[2]}] like q")
    if len(v_shape) != 3 or v_shape[0] != k_shape[0] or v_shape[1] != k_shape[1]:
        raise refuse_shape(function, "v", v, f"[{k_shape[0]}, {k_shape[1]}, Dv] like k")
    for argument, tensor in (("k", k), ("v", v)):
        if tensor.dtype is not q.dtype:
            raise refuse_dtype(function, argument, tensor, "the dtype of q")
    _check_heads_and_devices(function, q, k_shape[1], (("k", k), ("v", v)))
    key = (device_of(q), q.dtype, k.dtype, q_shape[2], v_shape[2], q_shape[1], k_shape[1])
    check_vector(function, "qo_indptr", qo_indptr, torch.int32, None, q, "[B + 1]")
    check_vector(function, "kv_indptr", kv_indptr, torch.int32, qo_indptr.shape[0], q, "[B + 1] like qo_indptr")
    _check_mask(function, q, qo_indptr, custom_mask, mask_indptr)
    out = _check_rows(function, q, v_shape[2], sinks, out, lse)
    if sm_scale is None:
        sm_scale = q_shape[2] ** -0.5
    op = torch.ops.gristmill.ragged_attention if torch.compiler.is_compiling() else select(function, key)
    op(out, lse, q, k, v, qo_indptr, kv_indptr, custom_mask, mask_indptr, sinks, causal, sm_scale, logit_cap, window_left)
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


def merge_states(o: Tensor, lse: Tensor, *, out: Tensor | None = None, out_lse: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Combine N partial attention results over disjoint keys into the result over their union.

    Args:
        o: [N, T, H, D] normalised outputs, float32, float16 or bfloat16; N may be 0.
        lse: [N, T, H] float32, natural logarithm.
        out: [T, H, D], dtype of o; may be `o[i]` for one i. Allocated when None.
        out_lse: [T, H] float32; may be `lse[i]` for one i. Allocated when None.

    Returns:
        `(out, out_lse)`. Where every state is empty (LSE -inf) they are 0 and -inf; where all but one are, that one comes out bit for bit;
        what the output of an empty state holds never matters. States are added in the order given.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: as `merge_state`.
    """
    check_float("merge_states", "o", o)
    if o.ndim != 4:
        raise refuse_shape("merge_states", "o", o, "[N, T, H, D]")
    num_states, num_rows, num_heads, width = o.shape
    shape, rows = (num_rows, num_heads, width), (num_rows, num_heads)
    if out is None:
        out = torch.empty(shape, dtype=o.dtype, device=o.device)
    else:
        check_like("merge_states", "out", out, o, shape, "[T, H, D]")
    if out_lse is None:
        out_lse = torch.empty(rows, dtype=torch.float32, device=o.device)
    for argument, tensor, right in (("lse", lse, (num_states, *rows)), ("out_lse", out_lse, rows)):
        if tensor.dtype is not torch.float32:
            raise refuse_dtype("merge_states", argument, tensor, "float32")
        if tensor.shape != right or not is_dense(tensor):
            raise refuse_shape("merge_states", argument, tensor, f"{right} with contiguous rows")
        if not same_device(tensor, o):
            raise refuse_device("merge_states", argument, tensor, o)
    op = torch.ops.gristmill.merge_states if torch.compiler.is_compiling() else select("merge_states", norm_key(o))
    op(out, out_lse, o, lse)
    return out, out_lse

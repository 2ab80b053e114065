"""Attention over a slot pool addressed by CSR lists, from the definition, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# Score elements held at once while rows of a long chunk are computed.
_MAX_SCORES = 1 << 23


def decode_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sinks: Tensor | None,
    plan: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    # A decode row is the last row of its request; the plan only spreads the work.
    qo_indptr = torch.arange(q.shape[0] + 1, dtype=torch.int32)
    extend_attention(
        out, lse, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, None, None, sinks,
        True, sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip


def extend_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    q_starts, kv_starts = qo_indptr.tolist(), kv_indptr.tolist()
    mask_starts = mask_indptr.tolist() if mask_indptr is not None else []
    if kv_starts[-1] > len(kv_indices):
        raise RuntimeError(f"attention: kv_indptr ends at {kv_starts[-1]}, but kv_indices has {len(kv_indices)} entries")
    if q_starts[-1] > q.shape[0]:
        raise RuntimeError(f"attention: qo_indptr ends at {q_starts[-1]}, but q has {q.shape[0]} rows")
    if kv_starts[-1] and int(kv_indices[: kv_starts[-1]].max()) >= k_cache.shape[0]:
        raise RuntimeError(f"attention: kv_indices holds {int(kv_indices.max())}, but the pool has {k_cache.shape[0]} slots")
    for request in range(len(q_starts) - 1):
        q_begin, q_end = q_starts[request : request + 2]
        kv_begin, kv_end = kv_starts[request : request + 2]
        q_len, kv_len = q_end - q_begin, kv_end - kv_begin
        slots = kv_indices[kv_begin:kv_end].long()
        keys = k_cache[slots.clamp(min=0)].double()  # exact, also of an 8-bit cache
        values = v_cache[slots.clamp(min=0)].double()
        rows_at_once = max(1, _MAX_SCORES // max(1, kv_len * q.shape[1]))
        for begin in range(0, q_len, rows_at_once):
            end = min(begin + rows_at_once, q_len)
            visible = _visible(begin, end, q_len, kv_len, causal and custom_mask is None, window_left, q.device)
            if custom_mask is not None:
                offset = mask_starts[request]
                visible &= custom_mask[offset + begin * kv_len : offset + end * kv_len].view(end - begin, kv_len)
            visible &= slots >= 0  # a negative slot is a hole that keeps its place
            rows = slice(q_begin + begin, q_begin + end)
            result, result_lse = _attend(q[rows], keys, values, visible, sinks, sm_scale * k_scale, logit_cap)
            out[rows] = (result * v_scale).to(out.dtype)
            if lse is not None:
                lse[rows] = result_lse.float()


def ragged_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
) -> None:
    # Row j of k and v is slot j of a pool.
    slots = torch.arange(k.shape[0], dtype=torch.int32, device=k.device)
    extend_attention(
        out, lse, q, k, v, qo_indptr, kv_indptr, slots, custom_mask, mask_indptr, sinks, causal, sm_scale, logit_cap, window_left, 1.0, 1.0
    )


def _visible(begin: int, end: int, q_len: int, kv_len: int, causal: bool, window_left: int, device: torch.device) -> Tensor:
    """bool [rows, kv_len]; row i of the request sits at position kv_len - q_len + i."""
    position = torch.arange(begin, end, device=device)[:, None] + (kv_len - q_len)
    key = torch.arange(kv_len, device=device)[None]
    visible = torch.ones(end - begin, kv_len, dtype=torch.bool, device=device)
    if causal:
        visible &= key <= position
    if window_left >= 0:
        visible &= key >= position - window_left
    return visible


def _attend(
    q: Tensor, keys: Tensor, values: Tensor, visible: Tensor, sinks: Tensor | None, scale: float, logit_cap: float
) -> tuple[Tensor, Tensor]:
    """Rows [R, Hq, D] against [N, Hkv, D] and [N, Hkv, Dv]; returns float64 [R, Hq, Dv] and LSE [R, Hq]."""
    num_rows, num_qo_heads, head_dim = q.shape
    num_kv_heads = keys.shape[1]
    # What no row may see must not count even if its slot holds NaN, and 0 * NaN is NaN.
    seen = visible.any(0)[:, None, None]
    keys, values = keys.where(seen, 0.0), values.where(seen, 0.0)
    grouped = q.double().view(num_rows, num_kv_heads, num_qo_heads // num_kv_heads, head_dim)
    scores = torch.einsum("rhgd,nhd->rhgn", grouped, keys) * scale
    if logit_cap > 0:
        scores = logit_cap * torch.tanh(scores / logit_cap)
    scores = scores.masked_fill(~visible[:, None, None, :], float("-inf"))
    if sinks is not None:
        sink = sinks.double().view(1, num_kv_heads, -1, 1).expand(num_rows, -1, -1, 1)
        scores = torch.cat([scores, sink], dim=-1)
        values = torch.cat([values, values.new_zeros(1, *values.shape[1:])])
    # A further -inf stands in for the maximum of a row without keys; the sum of an empty row is 0 and its output 0 / 1.
    largest = torch.nn.functional.pad(scores, (0, 1), value=float("-inf")).amax(-1)
    weights = torch.exp(scores - largest.masked_fill(largest == float("-inf"), 0.0)[..., None])
    total = weights.sum(-1)
    result = torch.einsum("rhgn,nhd->rhgd", weights, values) / total.masked_fill(total == 0, 1.0)[..., None]
    return result.reshape(num_rows, num_qo_heads, -1), (largest + total.log()).reshape(num_rows, num_qo_heads)


def merge_state(out: Tensor, out_lse: Tensor, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    empty = float("-inf")
    wide_a, wide_b = lse_a.double(), lse_b.double()
    largest = torch.maximum(wide_a, wide_b)
    base = largest.masked_fill(largest == empty, 0.0)
    weight_a, weight_b = torch.exp(wide_a - base)[..., None], torch.exp(wide_b - base)[..., None]
    # An empty state has weight 0 and its output may be anything.
    part_a = (weight_a * o_a.double()).masked_fill(weight_a == 0, 0.0)
    part_b = (weight_b * o_b.double()).masked_fill(weight_b == 0, 0.0)
    total = weight_a + weight_b
    merged = ((part_a + part_b) / total.masked_fill(total == 0, 1.0)).to(out.dtype)
    lse = largest + total[..., 0].log()  # -inf for two empty states
    only_a, only_b = (lse_b == empty) & (lse_a != empty), (lse_a == empty) & (lse_b != empty)
    merged = torch.where(only_a[..., None], o_a, torch.where(only_b[..., None], o_b, merged))
    lse = torch.where(only_a, lse_a, torch.where(only_b, lse_b, lse.float()))
    out.copy_(merged)
    out_lse.copy_(lse)


def merge_states(out: Tensor, out_lse: Tensor, o: Tensor, lse: Tensor) -> None:
    empty = lse == float("-inf")
    wide = torch.nn.functional.pad(lse.double(), (0, 0, 0, 0, 0, 1), value=float("-inf"))  # so that no states make an empty one
    largest = wide.amax(0)
    weights = torch.exp(lse.double() - largest.masked_fill(largest == float("-inf"), 0.0))
    parts = (weights[..., None] * o.double()).masked_fill(empty[..., None], 0.0)  # the output of an empty state may be anything
    total = weights.sum(0)
    merged = (parts.sum(0) / total.masked_fill(total == 0, 1.0)[..., None]).to(out.dtype)
    merged_lse = (largest + total.log()).float()
    for one, one_lse, one_empty in zip(o, lse, empty):
        alone = ~one_empty & ((~empty).sum(0) == 1)
        merged, merged_lse = torch.where(alone[..., None], one, merged), torch.where(alone, one_lse, merged_lse)
    out.copy_(merged)
    out_lse.copy_(merged_lse)

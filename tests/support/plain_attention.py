"""Attention by its definition, for the doubles of attention libraries."""

from __future__ import annotations

import torch


def attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, *, causal: bool, window_left: int) -> torch.Tensor:
    """q [n, heads, dim] over k, v [m, kv_heads, dim]; the last query stands at the last key. What is masked still takes part with weight 0,
    so that a NaN in a key or value that must not be read shows."""
    n, m, group = q.shape[0], k.shape[0], q.shape[1] // k.shape[1]
    keys, values = (x.double().repeat_interleave(group, dim=1) for x in (k, v))
    scores = torch.einsum("nhd,mhd->hnm", q.double(), keys) * scale
    query, key = torch.arange(n)[:, None] + m - n, torch.arange(m)[None]
    hidden = torch.zeros(n, m, dtype=torch.bool)
    if causal:
        hidden |= key > query
    if window_left >= 0:
        hidden |= key < query - window_left
    weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1)
    return torch.einsum("hnm,mhd->nhd", weights, values).to(q.dtype)

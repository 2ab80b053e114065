"""Rotary position embedding (Su et al. 2021, eq. 34) from a table of cosines and sines, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels.reference.kvcache import store_kv


def _rotate(heads: Tensor, cos: Tensor, sin: Tensor, is_neox: bool) -> Tensor:
    """Rotate [T, H, R]; neox pairs element i with i + R/2, otherwise 2i with 2i + 1."""
    wide = heads.double()
    first, second = wide.chunk(2, dim=-1) if is_neox else (wide[..., 0::2], wide[..., 1::2])
    rotated = (first * cos - second * sin, second * cos + first * sin)
    return torch.cat(rotated, dim=-1) if is_neox else torch.stack(rotated, dim=-1).flatten(-2)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> None:
    num_positions, rotary_dim = cos_sin_cache.shape
    # A position outside the table marks padding: its row stays as it is.
    valid = (positions >= 0) & (positions < num_positions)
    rows = cos_sin_cache[positions.clamp(0, num_positions - 1).long()].double()
    cos, sin = rows[:, None].chunk(2, dim=-1)
    for x in (q, k):
        part = x[..., :rotary_dim]
        part.copy_(torch.where(valid[:, None, None], _rotate(part, cos, sin, is_neox).to(x.dtype), part))


def apply_rope_store_kv(
    q: Tensor,
    k: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    v: Tensor,
    positions: Tensor,
    cos_sin_cache: Tensor,
    slots: Tensor,
    is_neox: bool,
    k_scale: float = 1.0,
    v_scale: float = 1.0,
) -> None:
    apply_rope(q, k, positions, cos_sin_cache, is_neox)
    store_kv(k_cache, v_cache, k, v, slots, k_scale, v_scale)

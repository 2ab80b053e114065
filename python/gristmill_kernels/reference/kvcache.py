"""Writing, moving and transferring rows of the slot pool, in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor

# Largest finite value of the 8-bit floats; torch's own conversions overflow to infinity or NaN.
_LARGEST = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0, torch.float8_e4m3fnuz: 240.0}


def _bytes(cache: Tensor) -> Tensor:
    """8-bit floats as bytes, since few ops take them."""
    return cache.view(torch.uint8) if cache.dtype in _LARGEST else cache


def _quantised(rows: Tensor, scale: float, dtype: torch.dtype) -> Tensor:
    if scale == 1 and dtype is rows.dtype:
        return rows
    quotient = rows.float() / torch.tensor(scale, dtype=torch.float32, device=rows.device)
    if dtype in _LARGEST:
        quotient = quotient.clamp(-_LARGEST[dtype], _LARGEST[dtype])  # a NaN stays one
    return _bytes(quotient.to(dtype))


def _check_slots(function: str, name: str, slots: Tensor, num_slots: int) -> None:
    if slots.numel() and int(slots.max()) >= num_slots:
        raise RuntimeError(f"{function}: {name} holds {int(slots.max())}, but the pool has {num_slots} slots")


def store_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    _check_slots("store_kv", "slots", slots, k_cache.shape[0])
    kept = slots >= 0
    targets = slots[kept].long()
    for cache, rows, scale in ((k_cache, k, k_scale), (v_cache, v, v_scale)):
        _bytes(cache)[targets] = _quantised(rows[kept], scale, cache.dtype)


def copy_slots(k_cache: Tensor, v_cache: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    for name, slots in (("src_slots", src_slots), ("dst_slots", dst_slots)):
        _check_slots("copy_slots", name, slots, k_cache.shape[1])
    kept = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[kept].long(), dst_slots[kept].long()
    for cache in (k_cache, v_cache):
        if cache is not None:
            pool = _bytes(cache)
            pool[:, target] = pool[:, source]


def transfer_kv(dst_k: Tensor, dst_v: Tensor | None, src_k: Tensor, src_v: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    _check_slots("transfer_kv", "src_slots", src_slots, src_k.shape[0])
    _check_slots("transfer_kv", "dst_slots", dst_slots, dst_k.shape[0])
    kept = (src_slots >= 0) & (dst_slots >= 0)
    source, target = src_slots[kept].long(), dst_slots[kept].long()
    for to, rows in ((dst_k, src_k), (dst_v, src_v)):
        if to is not None and rows is not None:
            _bytes(to)[target.to(to.device)] = _bytes(rows)[source.to(rows.device)].to(to.device)

"""Writing keys and values into the slot pool, in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def store_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor) -> None:
    if slots.numel() and int(slots.max()) >= k_cache.shape[0]:
        raise RuntimeError(f"store_kv: slots holds {int(slots.max())}, but the pool has {k_cache.shape[0]} slots")
    kept = slots >= 0
    targets = slots[kept].long()
    k_cache[targets] = k[kept].to(k_cache.dtype)
    v_cache[targets] = v[kept].to(v_cache.dtype)

"""Writing keys and values into the slot pool."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_vector, refuse_device, refuse_dtype, refuse_shape


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor) -> None:
    """Copy row t of k and v to slot `slots[t]` of the pool; a negative slot (padding) is skipped.

    Args:
        k: [T, Hkv, D] float32, float16 or bfloat16; any outer strides.
        v: [T, Hkv, Dv], dtype of k.
        k_cache: [S, Hkv, D], dtype of k.
        v_cache: [S, Hkv, Dv], dtype of k.
        slots: [T] int32, each in [-1, S); no slot twice. A slot >= S is an error or skipped, never written.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    check_float("store_kv", "k", k)
    check_float("store_kv", "v", v)
    check_float("store_kv", "k_cache", k_cache)
    check_float("store_kv", "v_cache", v_cache)
    if k.dim() != 3:
        raise refuse_shape("store_kv", "k", k, "[T, Hkv, D]")
    if v.dim() != 3 or v.shape[:2] != k.shape[:2]:
        raise refuse_shape("store_kv", "v", v, f"[{k.shape[0]}, {k.shape[1]}, Dv] like k")
    if k_cache.dim() != 3 or k_cache.shape[1:] != k.shape[1:]:
        raise refuse_shape("store_kv", "k_cache", k_cache, f"[S, {k.shape[1]}, {k.shape[2]}] like k")
    if v_cache.dim() != 3 or v_cache.shape[1:] != v.shape[1:] or v_cache.shape[0] != k_cache.shape[0]:
        raise refuse_shape("store_kv", "v_cache", v_cache, f"[{k_cache.shape[0]}, {v.shape[1]}, {v.shape[2]}] like k_cache and v")
    dtype, device = k.dtype, k.device
    for argument, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
        if tensor.dtype is not dtype:
            raise refuse_dtype("store_kv", argument, tensor, "the dtype of k")
        if tensor.device != device:
            raise refuse_device("store_kv", argument, tensor, device)
    check_vector("store_kv", "slots", slots, torch.int32, k.shape[0], device, "[T]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.store_kv(k_cache, v_cache, k, v, slots)
    else:
        select("store_kv", (device.type, dtype, dtype))(k_cache, v_cache, k, v, slots)

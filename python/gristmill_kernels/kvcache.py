"""Writing keys and values into the slot pool."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_vector, refuse_device, refuse_dtype, refuse_shape, same_device
from gristmill_kernels.schema import store_key


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
    k_shape, v_shape, k_pool, v_pool = k.shape, v.shape, k_cache.shape, v_cache.shape
    if len(k_shape) != 3:
        raise refuse_shape("store_kv", "k", k, "[T, Hkv, D]")
    num_tokens, num_heads, head_dim = k_shape
    if len(v_shape) != 3 or v_shape[0] != num_tokens or v_shape[1] != num_heads:
        raise refuse_shape("store_kv", "v", v, f"[{num_tokens}, {num_heads}, Dv] like k")
    if len(k_pool) != 3 or k_pool[1] != num_heads or k_pool[2] != head_dim:
        raise refuse_shape("store_kv", "k_cache", k_cache, f"[S, {num_heads}, {head_dim}] like k")
    if v_pool != (k_pool[0], num_heads, v_shape[2]):
        raise refuse_shape("store_kv", "v_cache", v_cache, f"[{k_pool[0]}, {num_heads}, {v_shape[2]}] like k_cache and v")
    dtype = k.dtype
    if not (v.dtype is k_cache.dtype is v_cache.dtype is dtype and k.is_cpu and v.is_cpu and k_cache.is_cpu and v_cache.is_cpu):
        for argument, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
            if tensor.dtype is not dtype:
                raise refuse_dtype("store_kv", argument, tensor, "the dtype of k")
            if not same_device(tensor, k):
                raise refuse_device("store_kv", argument, tensor, k)
    check_vector("store_kv", "slots", slots, torch.int32, num_tokens, k, "[T]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.store_kv(k_cache, v_cache, k, v, slots)
    else:
        select("store_kv", store_key(k, k_cache))(k_cache, v_cache, k, v, slots)

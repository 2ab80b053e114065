"""Writing keys and values into the slot pool, moving them within it, and between two pools.

How a row is stored. A cache has the dtype of the rows or is float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz. What is stored is
float32(value) / float32(scale), a float32 division, rounded to the nearest value of the cache's dtype, ties to even; with scale 1 and
equal dtypes the bits are copied. An 8-bit cache saturates: what lies beyond its largest finite value (448, 57344, 240), infinities
included, becomes that value with its sign. A NaN stays a NaN (0x80 in e4m3fnuz, which has no negative zero either). Attention multiplies by
the same scales when it reads.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import (
    FLOAT8_DTYPES,
    check_float,
    check_vector,
    is_dense,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_stride,
    refuse_value,
    same_device,
)
from gristmill_kernels.schema import norm_key, store_key, transfer_key


def check_store(
    function: str, k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, k_scale: float, v_scale: float
) -> None:
    """The arguments that every op storing rows shares, as `store_kv` documents them."""
    check_float(function, "k", k)
    check_float(function, "v", v)
    k_shape, v_shape, k_pool, v_pool = k.shape, v.shape, k_cache.shape, v_cache.shape
    if len(k_shape) != 3:
        raise refuse_shape(function, "k", k, "[T, Hkv, D]")
    num_tokens, num_heads, head_dim = k_shape
    if len(v_shape) != 3 or v_shape[0] != num_tokens or v_shape[1] != num_heads:
        raise refuse_shape(function, "v", v, f"[{num_tokens}, {num_heads}, Dv] like k")
    if len(k_pool) != 3 or k_pool[1] != num_heads or k_pool[2] != head_dim:
        raise refuse_shape(function, "k_cache", k_cache, f"[S, {num_heads}, {head_dim}] like k")
    if v_pool != (k_pool[0], num_heads, v_shape[2]):
        raise refuse_shape(function, "v_cache", v_cache, f"[{k_pool[0]}, {num_heads}, {v_shape[2]}] like k_cache and v")
    dtype, cache_dtype = k.dtype, k_cache.dtype
    if not (v.dtype is cache_dtype is v_cache.dtype is dtype and k.is_cpu and v.is_cpu and k_cache.is_cpu and v_cache.is_cpu):
        if v.dtype is not dtype:
            raise refuse_dtype(function, "v", v, "the dtype of k")
        if cache_dtype is not dtype and cache_dtype not in FLOAT8_DTYPES:
            raise refuse_dtype(function, "k_cache", k_cache, "the dtype of k, float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz")
        if v_cache.dtype is not cache_dtype:
            raise refuse_dtype(function, "v_cache", v_cache, "the dtype of k_cache")
        for argument, tensor in (("v", v), ("k_cache", k_cache), ("v_cache", v_cache)):
            if not same_device(tensor, k):
                raise refuse_device(function, argument, tensor, k)
    for argument, cache in (("k_cache", k_cache), ("v_cache", v_cache)):
        if not is_dense(cache):
            raise refuse_stride(function, argument, cache)
    check_vector(function, "slots", slots, torch.int32, num_tokens, k, "[T]")
    if not 0 < k_scale < float("inf"):
        raise refuse_value(function, "k_scale", k_scale, "positive and finite")
    if not 0 < v_scale < float("inf"):
        raise refuse_value(function, "v_scale", v_scale, "positive and finite")


def store_kv(k: Tensor, v: Tensor, k_cache: Tensor, v_cache: Tensor, slots: Tensor, *, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    """Store row t of k and v, divided by the scales, in slot `slots[t]` of the pool; a negative slot (padding) is skipped.

    Args:
        k: [T, Hkv, D] float32, float16 or bfloat16; any outer strides.
        v: [T, Hkv, Dv], dtype of k.
        k_cache: [S, Hkv, D], dtype of k, float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz.
        v_cache: [S, Hkv, Dv], dtype of k_cache.
        slots: [T] int32, each in [-1, S); no slot twice. A slot >= S is an error or skipped, never written.
        k_scale: what a stored key is worth, the same number that attention gets; taken as float32.
        v_scale: the same for values.

    How a value is rounded and what saturates stands at the top of this module; every implementation stores the same bits, but for the
    payload of a NaN.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, device or scale that does not fit, in one sentence.

    Source of the 8-bit formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1; fnuz: Noune et al. 2022.
    """
    check_store("store_kv", k, v, k_cache, v_cache, slots, k_scale, v_scale)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.store_kv(k_cache, v_cache, k, v, slots, k_scale, v_scale)
    else:
        select("store_kv", store_key(k, k_cache))(k_cache, v_cache, k, v, slots, k_scale, v_scale)


def _check_cache(function: str, argument: str, cache: Tensor, dims: int, right: str) -> None:
    if not isinstance(cache, Tensor):
        raise TypeError(f"{function}: {argument} is a {type(cache).__name__}, but should be a torch.Tensor")
    if cache.ndim != dims:
        raise refuse_shape(function, argument, cache, right)
    if not is_dense(cache):
        raise refuse_stride(function, argument, cache)


def copy_slots(k_cache: Tensor, v_cache: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy slot `src_slots[i]` to slot `dst_slots[i]` of the same pool, in all layers at once: compaction after speculative verification,
    copy on write of a shared page.

    A destination may also be a source as long as the copy *to* it does not come before the copy *from* it in the lists:
    `dst_slots[i] == src_slots[j]` needs j <= i, as when accepted slots move to the front in order. Then copying pair after pair gives the
    same as reading all sources first, and implementations may do either.

    Args:
        k_cache: [S, Hkv, D] of one layer or [L, S, Hkv, D] of all; any dtype, any outer strides. Latent caches: [S, 1, D].
        v_cache: [S, Hkv, Dv] or [L, S, Hkv, Dv], dtype of k_cache; None for a latent cache.
        src_slots: [N] int32, each in [-1, S).
        dst_slots: [N] int32, each in [-1, S), none twice. A pair with a negative slot on either side is skipped; a slot >= S is an error or
            skipped.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    dims = 4 if isinstance(k_cache, Tensor) and k_cache.ndim == 4 else 3
    _check_cache("copy_slots", "k_cache", k_cache, dims, "[S, Hkv, D] or [L, S, Hkv, D]")
    if v_cache is not None:
        _check_cache("copy_slots", "v_cache", v_cache, dims, f"{dims}-dimensional like k_cache")
        if v_cache.shape[:-1] != k_cache.shape[:-1]:
            raise refuse_shape("copy_slots", "v_cache", v_cache, f"[{', '.join(map(str, k_cache.shape[:-1]))}, Dv] like k_cache")
        if v_cache.dtype is not k_cache.dtype:
            raise refuse_dtype("copy_slots", "v_cache", v_cache, "the dtype of k_cache")
        if not same_device(v_cache, k_cache):
            raise refuse_device("copy_slots", "v_cache", v_cache, k_cache)
    check_vector("copy_slots", "src_slots", src_slots, torch.int32, None, k_cache, "[N]")
    check_vector("copy_slots", "dst_slots", dst_slots, torch.int32, src_slots.shape[0], k_cache, "[N]")
    if dims == 3:
        k_cache, v_cache = k_cache[None], None if v_cache is None else v_cache[None]
    if torch.compiler.is_compiling():
        torch.ops.gristmill.copy_slots(k_cache, v_cache, src_slots, dst_slots)
    else:
        select("copy_slots", norm_key(k_cache))(k_cache, v_cache, src_slots, dst_slots)


def transfer_kv(src_k: Tensor, src_v: Tensor | None, dst_k: Tensor, dst_v: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    """Copy slot `src_slots[i]` of one layer of a pool to slot `dst_slots[i]` of another pool, bit for bit: device to host and back.

    Layer by layer, a load overlaps with the forward pass. The host pool may have any outer strides, so a page-first layout is a view of it:
    layer l of `[S, L, H, D]` is `host[:, l]`.

    Args:
        src_k: [S1, Hkv, D], any dtype; on an accelerator or on the host (pinned memory if the other side is an accelerator).
        src_v: [S1, Hkv, Dv], dtype and device of src_k; None for a latent cache ([S1, 1, D]).
        dst_k: [S2, Hkv, D], dtype of src_k; shares no memory with src_k.
        dst_v: [S2, Hkv, Dv]; None exactly when src_v is.
        src_slots: [N] int32, each in [-1, S1), on the accelerator when one is involved.
        dst_slots: [N] int32, each in [-1, S2), none twice. A pair with a negative slot on either side is skipped; a slot beyond its
            pool is an error or skipped.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    _check_cache("transfer_kv", "src_k", src_k, 3, "[S1, Hkv, D]")
    _check_cache("transfer_kv", "dst_k", dst_k, 3, "[S2, Hkv, D]")
    if dst_k.shape[1:] != src_k.shape[1:]:
        raise refuse_shape("transfer_kv", "dst_k", dst_k, f"[S2, {src_k.shape[1]}, {src_k.shape[2]}] like src_k")
    if dst_k.dtype is not src_k.dtype:
        raise refuse_dtype("transfer_kv", "dst_k", dst_k, "the dtype of src_k")
    if (src_v is None) is not (dst_v is None):
        missing = "src_v" if src_v is None else "dst_v"
        raise refuse_value("transfer_kv", missing, None, "given, since the other side has values")
    if src_v is not None and dst_v is not None:
        for argument, values, keys in (("src_v", src_v, src_k), ("dst_v", dst_v, dst_k)):
            _check_cache("transfer_kv", argument, values, 3, f"[{keys.shape[0]}, {keys.shape[1]}, Dv]")
            if values.shape[:2] != keys.shape[:2] or values.shape[2] != src_v.shape[2]:
                raise refuse_shape("transfer_kv", argument, values, f"[{keys.shape[0]}, {keys.shape[1]}, {src_v.shape[2]}] like the keys")
            if values.dtype is not src_k.dtype:
                raise refuse_dtype("transfer_kv", argument, values, "the dtype of src_k")
            if not same_device(values, keys):
                raise refuse_device("transfer_kv", argument, values, keys)
    both = dst_k if src_k.is_cpu else src_k
    check_vector("transfer_kv", "src_slots", src_slots, torch.int32, None, both, "[N]")
    check_vector("transfer_kv", "dst_slots", dst_slots, torch.int32, src_slots.shape[0], both, "[N]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.transfer_kv(dst_k, dst_v, src_k, src_v, src_slots, dst_slots)
    else:
        select("transfer_kv", transfer_key(dst_k, src_k))(dst_k, dst_v, src_k, src_v, src_slots, dst_slots)

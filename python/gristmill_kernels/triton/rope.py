"""Triton kernels of rotary embedding, alone and with the store of keys and values: one program per token and a few heads."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.schema import RopeStoreKey
from gristmill_kernels.triton import launch
from gristmill_kernels.triton.kvcache import bits_of, form_of, stored_form, supports_cache
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options, supports_float

# Elements that one program rotates, about.
_ELEMENTS = 2048


@triton.jit
def _rotated_pair(at, cos, sin, mask, SECOND: tl.constexpr):
    """Rotate the pairs whose first elements lie at `at` and second ones SECOND behind them, in place; returns them rounded."""
    first = tl.load(at, mask=mask, other=0.0)
    second = tl.load(at + SECOND, mask=mask, other=0.0)
    wide_first, wide_second = first.to(tl.float32), second.to(tl.float32)
    new_first = (wide_first * cos - wide_second * sin).to(first.dtype)
    new_second = (wide_second * cos + wide_first * sin).to(first.dtype)
    tl.store(at, new_first, mask=mask)
    tl.store(at + SECOND, new_second, mask=mask)
    return new_first, new_second


@triton.jit
def _rope_kernel(
    q, k, v, k_cache, v_cache, positions, slots, table,
    q_token: tl.int64, q_head: tl.int64, k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    k_slot: tl.int64, k_slot_head: tl.int64, v_slot: tl.int64, v_slot_head: tl.int64, table_row: tl.int64,
    num_positions: tl.int32, num_slots: tl.int32, k_scale: tl.float32, v_scale: tl.float32,
    Q_HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, HALF: tl.constexpr,
    HEADS: tl.constexpr, HALF_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr, NEOX: tl.constexpr, K_FORM: tl.constexpr, V_FORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    position = tl.load(positions + token)
    inside = (position >= 0) & (position < num_positions)
    pairs = tl.arange(0, HALF_BLOCK)
    row = table + tl.where(inside, position, 0).to(tl.int64) * table_row
    cos = tl.load(row + pairs, mask=pairs < HALF, other=0.0)[None, :]
    sin = tl.load(row + HALF + pairs, mask=pairs < HALF, other=0.0)[None, :]
    SECOND: tl.constexpr = HALF if NEOX else 1
    first = (pairs if NEOX else 2 * pairs)[None, :]
    Q_PARTS: tl.constexpr = (Q_HEADS + HEADS - 1) // HEADS
    if part < Q_PARTS:
        heads = part * HEADS + tl.arange(0, HEADS)
        mask = inside & (heads < Q_HEADS)[:, None] & (pairs < HALF)[None, :]
        _rotated_pair(q + token * q_token + heads.to(tl.int64)[:, None] * q_head + first, cos, sin, mask, SECOND)
    else:
        heads = (part - Q_PARTS) * HEADS + tl.arange(0, HEADS)
        own = (heads < KV_HEADS)[:, None]
        mask = own & (pairs < HALF)[None, :]
        wide_heads = heads.to(tl.int64)[:, None]
        k_row = k + token * k_token + wide_heads * k_head
        if k_cache is None:
            _rotated_pair(k_row + first, cos, sin, mask & inside, SECOND)
        else:
            slot = tl.load(slots + token).to(tl.int64)
            stored = (slot >= 0) & (slot < num_slots)
            # What lies outside the table is stored as it is: rotated by zero, without being written back.
            at = k_row + first
            old_first, old_second = tl.load(at, mask=mask, other=0.0), tl.load(at + SECOND, mask=mask, other=0.0)
            new_first, new_second = _rotated_pair(at, cos, sin, mask & inside, SECOND)
            new_first, new_second = tl.where(inside, new_first, old_first), tl.where(inside, new_second, old_second)
            to = k_cache + slot * k_slot + wide_heads * k_slot_head
            tl.store(to + first, stored_form(new_first, k_scale, K_FORM), mask=mask & stored)
            tl.store(to + first + SECOND, stored_form(new_second, k_scale, K_FORM), mask=mask & stored)
            cols = tl.arange(0, DIM_BLOCK)[None, :]
            rest = own & (cols >= 2 * HALF) & (cols < DIM) & stored
            tl.store(to + cols, stored_form(tl.load(k_row + cols, mask=rest, other=0.0), k_scale, K_FORM), mask=rest)
            values = own & (cols < DIM_V) & stored
            v_row = tl.load(v + token * v_token + wide_heads * v_head + cols, mask=values, other=0.0)
            v_to = v_cache + slot * v_slot + wide_heads * v_slot_head + cols
            tl.store(v_to, stored_form(v_row, v_scale, V_FORM), mask=values)


_rope = Kernel(_rope_kernel)


def _constants(q_heads: int, kv_heads: int, dim: int, dim_v: int, rotary_dim: int, is_neox: bool, forms: tuple[str, str]) -> tuple:
    half = rotary_dim // 2
    half_block = launch.next_power_of_2(half)
    heads = max(1, min(launch.next_power_of_2(max(q_heads, kv_heads)), _ELEMENTS // (2 * half_block)))
    return (q_heads, kv_heads, dim, dim_v, half, heads, half_block, launch.next_power_of_2(max(dim, dim_v)), is_neox, *forms)


def _launch(
    q: Tensor, k: Tensor, positions: Tensor, table: Tensor, is_neox: bool,
    v: Tensor | None = None, caches: tuple[Tensor, Tensor] | None = None, slots: Tensor | None = None,
    scales: tuple[float, float] = (1.0, 1.0),
) -> None:  # fmt: skip
    tokens, q_heads, dim = q.shape
    kv_heads = k.shape[1]
    strides = [*q.stride()[:2], *k.stride()[:2]]
    if v is None or caches is None:
        dim_v, num_slots, forms = 0, 0, ("copy", "copy")
        pools: tuple[Tensor | None, Tensor | None] = (None, None)
        strides += [0] * 6
    else:
        dim_v, num_slots = v.shape[2], caches[0].shape[0]
        forms = (form_of(k.dtype, caches[0].dtype, scales[0]), form_of(v.dtype, caches[1].dtype, scales[1]))
        pools = (bits_of(caches[0]), bits_of(caches[1]))
        strides += [*v.stride()[:2], *caches[0].stride()[:2], *caches[1].stride()[:2]]
    constants = _constants(q_heads, kv_heads, dim, dim_v, table.shape[1], is_neox, forms)
    parts = launch.cdiv(q_heads, constants[5]) + launch.cdiv(kv_heads, constants[5])
    args = (q, k, v, *pools, positions, slots, table, *strides, table.stride(0), table.shape[0], num_slots, *scales)
    _rope((tokens, parts, 1), args, constants, _OPTIONS)


_OPTIONS = Options(num_warps=4, num_stages=1)


def apply_rope(q: Tensor, k: Tensor, positions: Tensor, cos_sin_cache: Tensor, is_neox: bool) -> None:
    _launch(q, k, positions, cos_sin_cache, is_neox)


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
    _launch(q, k, positions, cos_sin_cache, is_neox, v, (k_cache, v_cache), slots, (k_scale, v_scale))


def _supports_store(key: RopeStoreKey) -> str | None:
    return supports_cache(key.dtype, key.cache_dtype)


OPS = {"apply_rope": Op(apply_rope, supports_float), "apply_rope_store_kv": Op(apply_rope_store_kv, _supports_store)}


def _aot(label: str, dim: int, rotary_dim: int, is_neox: bool, cache: torch.dtype | None, form: str) -> AotCase:
    rows = None if cache is None else torch.bfloat16
    slots = None if cache is None else torch.int32
    pointers = (torch.bfloat16, torch.bfloat16, rows, cache, cache, torch.int32, slots, torch.float32)
    constants = _constants(32, 8, dim, 0 if cache is None else dim, rotary_dim, is_neox, (form, form))
    return AotCase(label, _rope, pointers, constants, _OPTIONS)


AOT = [
    _aot("neox-128", 128, 128, True, None, "copy"),
    _aot("interleaved-64", 64, 64, False, None, "copy"),
    _aot("neox-128-store", 128, 128, True, torch.bfloat16, "copy"),
    _aot("neox-64of128-e4m3fn", 128, 64, True, torch.uint8, "e4m3fn"),
]

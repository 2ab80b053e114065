"""Triton kernels that write, move and transfer rows of the slot pool. 8-bit floats are made from bits, so that every GPU, and the
interpreter, stores what kvcache.py of the package defines, whether or not it knows the format."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.checks import FLOAT_DTYPES, name_of
from gristmill_kernels.schema import CopyKey, StoreKey, TransferKey
from gristmill_kernels.triton import launch, tables
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options

# How a value becomes a stored one: its bits, a quotient of the same dtype, or an 8-bit float.
_FORMS = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz"}
# Types that rows are moved as, none of them an index type, for which the launcher would claim no alignment.
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.float32, 8: torch.float64}
# Elements of a row that one program stores at once.
_STORE_ELEMENTS = 2048
_MOVE_PAIRS, _MOVE_ELEMENTS = 8, 1024


@triton.jit
def _float8_bits(value, MANTISSA: tl.constexpr, BIAS: tl.constexpr, LARGEST: tl.constexpr, FNUZ: tl.constexpr):
    """float32 to the nearest 8-bit float, ties to even, saturating; as uint8."""
    limited = tl.where(value > LARGEST, LARGEST, tl.where(value < -LARGEST, -LARGEST, value))
    bits = limited.to(tl.uint32, bitcast=True)
    magnitude = bits & 0x7FFFFFFF
    # Normal numbers: round away the low bits, then move the exponent to the new bias.
    DROPPED: tl.constexpr = 23 - MANTISSA
    odd = (magnitude >> DROPPED) & 1
    normal = ((magnitude + ((1 << (DROPPED - 1)) - 1) + odd) >> DROPPED) - ((127 - BIAS) << MANTISSA)
    # Subnormal ones: adding 2^(23 + exponent of their last place) makes float32 round to that place.
    MAGIC: tl.constexpr = (23 + 1 - BIAS - MANTISSA + 127) << 23
    magic = tl.full(magnitude.shape, MAGIC, tl.uint32).to(tl.float32, bitcast=True)
    small = (magnitude.to(tl.float32, bitcast=True) + magic).to(tl.uint32, bitcast=True) - MAGIC
    rounded = tl.where(magnitude < ((128 - BIAS) << 23), small, normal)
    sign = (bits >> 24) & 0x80
    if FNUZ:  # neither a negative zero nor more than one NaN
        stored = tl.where(rounded == 0, 0, rounded | sign)
        stored = tl.where(magnitude > 0x7F800000, 0x80, stored)
    else:
        stored = tl.where(magnitude > 0x7F800000, 0x7F, rounded) | sign
    return stored.to(tl.uint8)


@triton.jit
def stored_form(value, scale, FORM: tl.constexpr):
    """What the cache holds for `value`; see kvcache.py of the package. FORM: copy, divide, e4m3fn, e5m2 or e4m3fnuz."""
    if FORM == "copy":
        stored = value
    else:
        quotient = tl.div_rn(value.to(tl.float32), tl.full(value.shape, 1.0, tl.float32) * scale)
        if FORM == "divide":
            stored = quotient.to(value.dtype)
        elif FORM == "e4m3fn":
            stored = _float8_bits(quotient, 3, 7, 448.0, False)
        elif FORM == "e5m2":
            stored = _float8_bits(quotient, 2, 15, 57344.0, False)
        else:
            stored = _float8_bits(quotient, 3, 8, 240.0, True)
    return stored


@triton.jit
def _store_kernel(
    k_cache, v_cache, k, v, slots,
    k_slot: tl.int64, k_slot_head: tl.int64, v_slot: tl.int64, v_slot_head: tl.int64,
    k_token: tl.int64, k_head: tl.int64, v_token: tl.int64, v_head: tl.int64,
    num_slots: tl.int32, k_scale: tl.float32, v_scale: tl.float32,
    HEADS: tl.constexpr, DIM: tl.constexpr, DIM_V: tl.constexpr, HEAD_BLOCK: tl.constexpr, DIM_BLOCK: tl.constexpr,
    K_FORM: tl.constexpr, V_FORM: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots + token).to(tl.int64)
    if (slot >= 0) & (slot < num_slots):
        heads = tl.program_id(1) * HEAD_BLOCK + tl.arange(0, HEAD_BLOCK)
        wide_heads = heads.to(tl.int64)[:, None]
        cols = tl.arange(0, DIM_BLOCK)[None, :]
        mask = (heads < HEADS)[:, None] & (cols < DIM)
        keys = tl.load(k + token * k_token + wide_heads * k_head + cols, mask=mask, other=0.0)
        tl.store(k_cache + slot * k_slot + wide_heads * k_slot_head + cols, stored_form(keys, k_scale, K_FORM), mask=mask)
        mask = (heads < HEADS)[:, None] & (cols < DIM_V)
        values = tl.load(v + token * v_token + wide_heads * v_head + cols, mask=mask, other=0.0)
        tl.store(v_cache + slot * v_slot + wide_heads * v_slot_head + cols, stored_form(values, v_scale, V_FORM), mask=mask)


@triton.jit
def _copy_kernel(
    src_slots, dst_slots, cache,
    layer_stride: tl.int64, slot_stride: tl.int64, head_stride: tl.int64,
    count: tl.int32, num_slots: tl.int32,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    # One program moves its columns for all pairs, in order: a slot that a later pair overwrites has been read by then.
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    base = cache + tl.program_id(0).to(tl.int64) * layer_stride
    offsets = ((cols // DIM).to(tl.int64) * head_stride + cols % DIM)[None, :]
    for begin in range(0, count, PAIRS):
        pair = begin + tl.arange(0, PAIRS)
        source = tl.load(src_slots + pair, mask=pair < count, other=-1).to(tl.int64)
        target = tl.load(dst_slots + pair, mask=pair < count, other=-1).to(tl.int64)
        valid = (source >= 0) & (target >= 0) & (source < num_slots) & (target < num_slots)
        mask = valid[:, None] & (cols < WIDTH)[None, :]
        rows = tl.load(base + source[:, None] * slot_stride + offsets, mask=mask, other=0)
        tl.debug_barrier()  # all of them are read before any is written
        tl.store(base + target[:, None] * slot_stride + offsets, rows, mask=mask)


@triton.jit
def _transfer_kernel(
    src_slots, dst_slots, dst, src,
    dst_slot: tl.int64, dst_head: tl.int64, src_slot: tl.int64, src_head: tl.int64,
    count: tl.int32, num_dst_slots: tl.int32, num_src_slots: tl.int32,
    WIDTH: tl.constexpr, DIM: tl.constexpr, BLOCK: tl.constexpr, PAIRS: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0) * PAIRS + tl.arange(0, PAIRS)
    source = tl.load(src_slots + pair, mask=pair < count, other=-1).to(tl.int64)
    target = tl.load(dst_slots + pair, mask=pair < count, other=-1).to(tl.int64)
    valid = (source >= 0) & (target >= 0) & (source < num_src_slots) & (target < num_dst_slots)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = valid[:, None] & (cols < WIDTH)[None, :]
    heads, elements = (cols // DIM).to(tl.int64), cols % DIM
    rows = tl.load(src + source[:, None] * src_slot + (heads * src_head + elements)[None, :], mask=mask, other=0)
    tl.store(dst + target[:, None] * dst_slot + (heads * dst_head + elements)[None, :], rows, mask=mask)


_store = Kernel(_store_kernel)
_copy = Kernel(_copy_kernel)
_transfer = Kernel(_transfer_kernel)


def bits_of(cache: Tensor) -> Tensor:
    """An 8-bit float cache as bytes; others as they are."""
    return cache.view(torch.uint8) if cache.dtype in _FORMS else cache


def form_of(dtype: torch.dtype, cache_dtype: torch.dtype, scale: float) -> str:
    """The FORM of `stored_form`."""
    return _FORMS.get(cache_dtype) or ("copy" if scale == 1.0 else "divide")


def store_constants(heads: int, head_dim: int, head_dim_v: int) -> tuple[int, int, int, int, int]:
    """HEADS, DIM, DIM_V, HEAD_BLOCK and DIM_BLOCK of the store kernel."""
    columns = launch.next_power_of_2(max(head_dim, head_dim_v))
    return heads, head_dim, head_dim_v, max(1, min(launch.next_power_of_2(heads), _STORE_ELEMENTS // columns)), columns


def store_kv(k_cache: Tensor, v_cache: Tensor, k: Tensor, v: Tensor, slots: Tensor, k_scale: float = 1.0, v_scale: float = 1.0) -> None:
    tokens, heads, head_dim = k.shape
    constants = store_constants(heads, head_dim, v.shape[2])
    forms = (form_of(k.dtype, k_cache.dtype, k_scale), form_of(v.dtype, v_cache.dtype, v_scale))
    strides = (*k_cache.stride()[:2], *v_cache.stride()[:2], *k.stride()[:2], *v.stride()[:2])
    args = (bits_of(k_cache), bits_of(v_cache), k, v, slots, *strides, k_cache.shape[0], k_scale, v_scale)
    options = tables.row_options("store", launch.facts(k.device), constants[3] * constants[4])
    _store((tokens, launch.cdiv(heads, constants[3]), 1), args, (*constants, *forms), options)


def copy_slots(k_cache: Tensor, v_cache: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    for cache in (k_cache, v_cache):
        if cache is None or not src_slots.shape[0]:
            continue
        layers, num_slots, heads, dim = cache.shape
        pool = cache.view(_BITS[cache.element_size()])
        grid = (layers, launch.cdiv(heads * dim, _MOVE_ELEMENTS), 1)
        args = (src_slots, dst_slots, pool, *pool.stride()[:3], src_slots.shape[0], num_slots)
        _copy(grid, args, (heads * dim, dim, _MOVE_ELEMENTS, _MOVE_PAIRS), _MOVE_OPTIONS)


def transfer_kv(dst_k: Tensor, dst_v: Tensor | None, src_k: Tensor, src_v: Tensor | None, src_slots: Tensor, dst_slots: Tensor) -> None:
    for dst, src in ((dst_k, src_k), (dst_v, src_v)):
        if dst is None or src is None:
            continue
        for name, pool in (("dst", dst), ("src", src)):
            if pool.is_cpu and not src_slots.is_cpu and not pool.is_pinned():
                raise ValueError(f"transfer_kv: the {name} pool lies in pageable host memory, but a GPU reaches pinned memory only")
        _, heads, dim = dst.shape
        to, rows = (pool.view(_BITS[pool.element_size()]) for pool in (dst, src))
        count = src_slots.shape[0]
        grid = (launch.cdiv(count, _MOVE_PAIRS), launch.cdiv(heads * dim, _MOVE_ELEMENTS), 1)
        args = (src_slots, dst_slots, to, rows, *to.stride()[:2], *rows.stride()[:2], count, to.shape[0], rows.shape[0])
        _transfer(grid, args, (heads * dim, dim, _MOVE_ELEMENTS, _MOVE_PAIRS), _MOVE_OPTIONS)


_MOVE_OPTIONS = Options(num_warps=8, num_stages=1)


def supports_cache(dtype: torch.dtype, cache_dtype: torch.dtype) -> str | None:
    """Why rows of `dtype` cannot be stored in such a cache, or None."""
    if dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(dtype)} is not float32, float16 or bfloat16"
    if cache_dtype is not dtype and cache_dtype not in _FORMS:
        return f"the cache is {name_of(cache_dtype)}, the new rows {name_of(dtype)}"
    return None


def _supports_store(key: StoreKey) -> str | None:
    return supports_cache(key.dtype, key.cache_dtype)


def _supports_moving(key: CopyKey | TransferKey) -> str | None:
    return None if key.dtype.itemsize in _BITS else f"elements of {key.dtype.itemsize} bytes"


OPS = {
    "store_kv": Op(store_kv, _supports_store),
    "copy_slots": Op(copy_slots, _supports_moving),
    "transfer_kv": Op(transfer_kv, _supports_moving),
}


def _aot_store(heads: int, dims: tuple[int, int], cache: torch.dtype, form: str) -> AotCase:
    constants = store_constants(heads, *dims)
    pointers = (cache, cache, torch.bfloat16, torch.bfloat16, torch.int32)
    return AotCase(
        f"{heads}x{dims[0]}-{form}", _store, pointers, (*constants, form, form),
        lambda arch: tables.row_options("store", tables.aot_facts(arch), constants[3] * constants[4]),
    )  # fmt: skip


AOT = [
    _aot_store(8, (128, 128), torch.bfloat16, "copy"),
    _aot_store(8, (128, 128), torch.uint8, "e4m3fn"),
    _aot_store(1, (576, 512), torch.uint8, "e4m3fnuz"),
    AotCase("8x128", _copy, (torch.int32, torch.int32, torch.int16), (1024, 128, _MOVE_ELEMENTS, _MOVE_PAIRS), _MOVE_OPTIONS),
    AotCase(
        "8x128", _transfer, (torch.int32, torch.int32, torch.int16, torch.int16), (1024, 128, _MOVE_ELEMENTS, _MOVE_PAIRS), _MOVE_OPTIONS
    ),
]

"""Latent attention decode in Triton: split-KV over a cache whose rows are key and value at once, so each is gathered once and used in both
products. Rows of a tile are (query row, head) pairs of one request; several query rows are causal among themselves.

Promise: as in attention_decode.py, and a row does not depend on its place among several query rows either: tiles, splits and blocks depend
on the number of heads, on dtypes and on whether rows are aligned to 16 bytes.

Many heads on Hopper GPUs have a split kernel of their own, mla_hopper.py, with the same partial results.

Source: DeepSeek-AI, "DeepSeek-V2" (2024), section 2.1.2 and appendix C; Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

import functools

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.schema import SPLIT_TOKENS, MlaKey, StoreKey
from gristmill_kernels.triton import attention_tables, kvcache, launch
from gristmill_kernels.triton.attention_parts import (
    FLOATS,
    MAX_HEAD_DIM,
    first_item,
    ln_2,
    log2_e,
    request_of_item,
    softmax_step,
    unreadable,
)
from gristmill_kernels.triton.attention_tables import MlaConfig
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options


@triton.jit
def _storage(kv_indptr, plan, request, max_q_len, SPLIT: tl.constexpr):
    """Where the parts of a request begin in the workspace, in items, and how many query rows an item has room for. A plan has counted its
    items (layout: schema.py); without one they are numbered as in attention_parts.py."""
    if plan is None:
        base, rows = first_item(kv_indptr, request, 1, SPLIT).to(tl.int64), max_q_len.to(tl.int64)
    else:
        num_workers = tl.load(plan + 3)
        base, rows = tl.load(plan + 8 + num_workers + 1 + request).to(tl.int64), tl.load(plan + 5).to(tl.int64)
    return base, rows


@triton.jit
def _room(kv_indptr, plan, batch, SPLIT: tl.constexpr):
    """Items that the workspace has room for."""
    if plan is None:
        room = (tl.load(kv_indptr + batch) // SPLIT + batch).to(tl.int64)
    else:
        room = tl.load(plan + 6).to(tl.int64)
    return room


@triton.jit
def _mla_split_kernel(
    partial, q_nope, q_rope, kv_cache, qo_indptr, kv_indptr, kv_indices, plan,
    nope_row: tl.int64, nope_head: tl.int64, rope_row: tl.int64, rope_head: tl.int64, cache_slot: tl.int64,
    batch: tl.int32, max_q_len: tl.int32, scale: tl.float32,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_R: tl.constexpr, VALUE_PARTS: tl.constexpr,
    SPLIT: tl.constexpr,
):  # fmt: skip
    """Partial results of (item, query row, head): float32 weighted sums [.., LATENT], then maxima (powers of 2) and totals.

    Programs of one item follow one another, so that they find its rows in the L2. With VALUE_PARTS 2 a program sums one half of the values
    only, which lets it hold twice the rows; both halves compute all scores.
    """
    items = tl.load(kv_indptr + batch) // SPLIT + batch
    room = _room(kv_indptr, plan, batch, SPLIT)
    part = tl.program_id(0)
    PART: tl.constexpr = BLOCK_L // VALUE_PARTS
    latent, rope, offset = part * PART + tl.arange(0, PART), tl.arange(0, BLOCK_R), tl.arange(0, BLOCK_N)
    other = (1 - part) * PART + tl.arange(0, PART)
    factor = scale * log2_e
    for item in tl.range(tl.program_id(2), items, tl.num_programs(2), num_stages=1, disable_licm=True):
        request = request_of_item(kv_indptr, item, batch, 1, SPLIT)
        begin = tl.load(kv_indptr + request)
        kv_len = tl.load(kv_indptr + request + 1) - begin
        start = (item - first_item(kv_indptr, request, 1, SPLIT)) * SPLIT
        q_begin, q_len = request, 1
        if qo_indptr is not None:
            q_begin = tl.load(qo_indptr + request)
            q_len = tl.load(qo_indptr + request + 1) - q_begin
        base, rows_per_item = _storage(kv_indptr, plan, request, max_q_len, SPLIT)
        maxima = partial + room * rows_per_item * (NUM_HEADS * LATENT)
        totals = maxima + room * rows_per_item * NUM_HEADS
        list_at = kv_indices + begin
        tiles = (q_len * NUM_HEADS + BLOCK_M - 1) // BLOCK_M
        if (start < 0) | (start >= kv_len):
            tiles = 0
        for tile in tl.range(tl.program_id(1), tiles, tl.num_programs(1), num_stages=1, disable_licm=True):
            row = tile * BLOCK_M + tl.arange(0, BLOCK_M)
            token, head = row // NUM_HEADS, row % NUM_HEADS
            valid = token < q_len
            position = kv_len - q_len + token
            last_position = kv_len - q_len + tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // NUM_HEADS, q_len - 1)
            stop = tl.minimum(tl.minimum(start + SPLIT, kv_len), last_position + 1)
            if start < stop:
                nope_at = q_nope + (q_begin + token).to(tl.int64) * nope_row + head.to(tl.int64) * nope_head
                rope_at = q_rope + (q_begin + token).to(tl.int64) * rope_row + head.to(tl.int64) * rope_head
                q_l = tl.load(nope_at[:, None] + latent[None, :], mask=valid[:, None] & (latent[None, :] < LATENT), other=0.0)
                if VALUE_PARTS == 2:
                    q_o = tl.load(nope_at[:, None] + other[None, :], mask=valid[:, None] & (other[None, :] < LATENT), other=0.0)
                q_r = tl.load(rope_at[:, None] + rope[None, :], mask=valid[:, None] & (rope[None, :] < ROPE), other=0.0)
                largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
                total = tl.zeros([BLOCK_M], tl.float32)
                sums = tl.zeros([BLOCK_M, PART], tl.float32)
                slots = tl.load(list_at + start + offset, mask=start + offset < stop, other=-1)
                for block in tl.range(start, stop, BLOCK_N, disable_licm=True):
                    there = slots >= 0
                    rows_at = kv_cache + slots.to(tl.int64)[:, None] * cache_slot
                    kv = tl.load(rows_at + latent[None, :], mask=there[:, None] & (latent[None, :] < LATENT), other=0.0)
                    k_r = tl.load(rows_at + LATENT + rope[None, :], mask=there[:, None] & (rope[None, :] < ROPE), other=0.0)
                    following = block + BLOCK_N + offset
                    slots = tl.load(list_at + following, mask=following < stop, other=-1)
                    kv = kv.to(q_l.dtype)
                    scores = tl.dot(q_l, tl.trans(kv), input_precision="ieee")
                    if VALUE_PARTS == 2:
                        k_o = tl.load(rows_at + other[None, :], mask=there[:, None] & (other[None, :] < LATENT), other=0.0)
                        scores = tl.dot(q_o, tl.trans(k_o.to(q_l.dtype)), scores, input_precision="ieee")
                    scores = tl.dot(q_r, tl.trans(k_r.to(q_l.dtype)), scores, input_precision="ieee")
                    seen = there[None, :] & (block + offset[None, :] <= position[:, None])
                    scores = tl.where(seen, scores, float("-inf"))
                    weights, rescale, largest, total = softmax_step(scores, largest, total, factor)
                    sums = tl.dot(weights.to(q_l.dtype), kv, sums * rescale[:, None], input_precision="ieee")
                entry = ((base + start // SPLIT) * rows_per_item + token) * NUM_HEADS + head
                tl.store(partial + entry[:, None] * LATENT + latent[None, :], sums, mask=valid[:, None] & (latent[None, :] < LATENT))
                tl.store(maxima + entry, largest * factor, mask=valid & (part == 0))
                tl.store(totals + entry, total, mask=valid & (part == 0))


@triton.jit
def _mla_merge_kernel(
    out, lse, partial, qo_indptr, kv_indptr, plan,
    out_row: tl.int64, out_head: tl.int64,
    batch: tl.int32, max_q_len: tl.int32, lse_row: tl.int32, kv_scale: tl.float32,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, BLOCK_L: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one (query row, head) in ascending order and normalise."""
    row, head = tl.program_id(0), tl.program_id(1)
    request, token, q_len = row, 0, 1
    if qo_indptr is not None:
        request = _request_of_row(qo_indptr, row, batch)
        if request >= batch:
            return
        q_begin = tl.load(qo_indptr + request)
        token = row - q_begin
        q_len = tl.load(qo_indptr + request + 1) - q_begin
    kv_len = tl.load(kv_indptr + request + 1) - tl.load(kv_indptr + request)
    high = (tl.maximum(kv_len - q_len + token + 1, 0) + SPLIT - 1) // SPLIT
    room = _room(kv_indptr, plan, batch, SPLIT)
    base, rows_per_item = _storage(kv_indptr, plan, request, max_q_len, SPLIT)
    maxima = partial + room * rows_per_item * (NUM_HEADS * LATENT)
    totals = maxima + room * rows_per_item * NUM_HEADS
    latent, split = tl.arange(0, BLOCK_L), tl.arange(0, BLOCK_SPLITS)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    sums = tl.zeros([BLOCK_L], tl.float32)
    for first in range(0, high, BLOCK_SPLITS):
        entry = ((base + first + split) * rows_per_item + token) * NUM_HEADS + head
        there = first + split < high
        part_largest = tl.load(maxima + entry, mask=there, other=float("-inf"))
        part_total = tl.load(totals + entry, mask=there, other=0.0)
        part = tl.load(partial + entry[:, None] * LATENT + latent[None, :], mask=there[:, None] & (latent[None, :] < LATENT), other=0.0)
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        base_2 = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight, rescale = tl.exp2(part_largest - base_2), tl.exp2(largest - base_2)
        sums = sums * rescale + tl.sum(part * weight[:, None], 0)
        total = total * rescale + tl.sum(part_total * weight, 0)
        largest = new_largest
    result = sums * (kv_scale / tl.where(total == 0.0, 1.0, total))
    out_at = out + row.to(tl.int64) * out_row + head.to(tl.int64) * out_head
    tl.store(out_at + latent, result.to(out.dtype.element_ty), mask=latent < LATENT)
    if lse is not None:
        tl.store(lse + row.to(tl.int64) * lse_row + head + tl.arange(0, 1), (largest + tl.log2(total)) * ln_2)


@triton.jit
def _request_of_row(qo_indptr, row, batch):
    """The request whose query rows include `row`; `batch` if none does."""
    before = 0
    for first in range(0, batch, 128):
        request = first + tl.arange(0, 128)
        end = tl.load(qo_indptr + request + 1, mask=request < batch, other=0)
        before += tl.sum(((end <= row) & (request < batch)).to(tl.int32), axis=0)
    return before


_split = Kernel(_mla_split_kernel)
_merge = Kernel(_mla_merge_kernel)


def mla_decode(
    out: Tensor,
    lse: Tensor | None,
    q_nope: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    plan: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    kv_scale: float,
) -> None:
    """As the public function. With qo_indptr and no plan the largest q_len is read back from the device: to capture a graph,
    pass a plan."""
    facts = (launch.facts(q_nope.device).arch, q_nope.dtype, kv_cache.dtype, q_nope.shape[2], q_rope.shape[2], q_nope.shape[1])
    config = attention_tables.mla_hopper_config(*facts)
    if config is None or not _gluon_works() or not _vectors(q_nope, q_rope, kv_cache, *(() if workspace is None else (workspace,))):
        config = attention_tables.mla_config(*facts)
    mla_decode_with(config, out, lse, q_nope, q_rope, kv_cache, qo_indptr, kv_indptr, kv_indices, plan, workspace, sm_scale, kv_scale)


def mla_decode_with(
    config: MlaConfig,
    out: Tensor,
    lse: Tensor | None,
    q_nope: Tensor,
    q_rope: Tensor,
    kv_cache: Tensor,
    qo_indptr: Tensor | None,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    plan: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    kv_scale: float,
) -> None:
    """`mla_decode` in a given configuration: what the tuner times."""
    rows, num_heads, latent = q_nope.shape
    batch = kv_indptr.shape[0] - 1
    if not rows or batch <= 0:
        return
    if config.split_tokens % SPLIT_TOKENS:
        raise ValueError(f"mla_decode: split_tokens is {config.split_tokens}, should be a multiple of {SPLIT_TOKENS}")
    max_items = kv_indices.shape[0] // config.split_tokens + batch
    max_q_len = 1
    if plan is None:
        if qo_indptr is not None:
            max_q_len = int((qo_indptr[1:] - qo_indptr[:-1]).max())
        workspace = torch.empty(max_items * max_q_len * num_heads * (latent + 2), dtype=torch.float32, device=q_nope.device)
    tiles = launch.cdiv(launch.cdiv(rows, batch) * num_heads, config.block_m)
    programs = min(
        max_items, launch.cdiv(launch.facts(q_nope.device).num_processors * config.programs_per_processor, tiles * config.value_parts)
    )
    strides = (q_nope.stride(0), q_nope.stride(1), q_rope.stride(0), q_rope.stride(1), kv_cache.stride(0))
    split_kernel(config)(
        (config.value_parts, tiles, programs),
        (
            workspace, q_nope, q_rope, kv_cache, qo_indptr, kv_indptr, kv_indices, plan,
            *strides, batch, max_q_len, sm_scale * kv_scale,
        ),
        split_constants(num_heads, latent, q_rope.shape[2], config),
        config.options,
    )  # fmt: skip
    _merge(
        (rows, num_heads, 1),
        (
            out, lse, workspace, qo_indptr, kv_indptr, plan, out.stride(0), out.stride(1),
            batch, max_q_len, 0 if lse is None else lse.stride(0), kv_scale,
        ),
        (num_heads, latent, launch.next_power_of_2(latent), _MERGE_SPLITS, config.split_tokens),
        Options(num_warps=4, num_stages=2),
    )  # fmt: skip


# Splits that the merge reads at once.
_MERGE_SPLITS = 4


@functools.cache
def _gluon_works() -> bool:
    """Gluon is experimental: only the versions it was tried with."""
    return ".".join(triton.__version__.split(".")[:2]) in launch.KNOWN_VERSIONS


def _vectors(*tensors: Tensor) -> bool:
    """Whether the compiler will know that rows of 16-bit elements can be copied 16 bytes at a time; `kernel[grid]` tells it of strides
    that are multiples of 16 only."""
    step = 16 if launch.use_plain_launch() else 8
    return not any(tensor.data_ptr() % 16 or any(stride % step for stride in tensor.stride()[:-1]) for tensor in tensors)


def split_kernel(config: MlaConfig) -> Kernel:
    """The kernel that a configuration is for. Gluon is imported with the first that needs it."""
    if not config.hopper:
        return _split
    from gristmill_kernels.triton import mla_hopper

    return mla_hopper.split


def split_constants(num_heads: int, latent: int, rope: int, config: MlaConfig) -> tuple:
    """Constants of the split kernel, in its order."""
    if config.hopper:
        return (num_heads, latent, rope, config.block_m, config.block_n, config.split_tokens)
    blocks = (max(16, launch.next_power_of_2(latent)), max(16, launch.next_power_of_2(rope)))
    return (num_heads, latent, rope, config.block_m, config.block_n, *blocks, config.value_parts, config.split_tokens)


def mla_store(kv_cache: Tensor, kv_c: Tensor, k_rope: Tensor, slots: Tensor, kv_scale: float) -> None:
    """As the public function: latent vector and rope key are stored as key and value of one head."""
    cache, latent = kv_cache[:, None], kv_c.shape[1]
    kvcache.store_kv(cache[..., :latent], cache[..., latent:], kv_c[:, None], k_rope[:, None], slots, kv_scale, kv_scale)


def supports(key: MlaKey) -> str | None:
    """Any latent and rope width that fit a program."""
    if key.dtype not in FLOATS:
        return f"dtype {key.dtype} is not float32, float16 or bfloat16"
    if key.latent_dim + key.rope_dim > MAX_HEAD_DIM:
        return f"rows of {key.latent_dim} + {key.rope_dim} exceed {MAX_HEAD_DIM}"
    return unreadable(key.device, key.dtype, key.cache_dtype)


def supports_store(key: StoreKey) -> str | None:
    """What store_kv stores."""
    return kvcache.OPS["store_kv"].supports(key)


OPS = {"mla_decode": Op(mla_decode, supports), "mla_store": Op(mla_store, supports_store)}

_BF16, _INT, _WIDE = torch.bfloat16, torch.int32, torch.float32


def _aot(arch: str, num_heads: int, cache: torch.dtype = _BF16) -> AotCase:
    config = attention_tables.mla_config(arch, _BF16, cache, 512, 64, num_heads)
    types = (_WIDE, _BF16, _BF16, cache, None, _INT, _INT, None)
    label = f"{num_heads}-{cache.itemsize * 8}bit-{arch}"
    return AotCase(label, _split, types, split_constants(num_heads, 512, 64, config), config.options, True, (arch,))


def _aot_hopper(dtype: torch.dtype, *plan: torch.dtype | None) -> AotCase:
    config = attention_tables.mla_hopper_config("sm90", dtype, dtype, 512, 64, 128)
    assert config is not None
    types = (_WIDE, dtype, dtype, dtype, plan[0], _INT, _INT, plan[1])
    return AotCase(
        f"hopper-{dtype}{'-plan' * (plan[1] is not None)}", split_kernel(config), types, split_constants(128, 512, 64, config),
        config.options, True, ("sm90",),
    )  # fmt: skip


AOT = [
    *([_aot_hopper(_BF16, None, None), _aot_hopper(torch.float16, _INT, _INT)] if _gluon_works() else ()),
    *(_aot(arch, heads) for arch in ("gfx90a", "gfx942", "gfx950", "sm90") for heads in (16, 128)),
    AotCase("128", _merge, (_BF16, _WIDE, _WIDE, None, _INT, None), (128, 512, 512, _MERGE_SPLITS, 1024), Options(4, 2)),
]

"""Latent attention decode of many heads on Hopper GPUs, in Gluon: what the split kernel of mla.py computes, with the overlap spelled out
that Triton's pipeliner does not find. Needs 16-bit data of one dtype, 512 + 64 columns, and rows that can be copied 16 bytes at a time.

Two groups of four warps share a tile of 64 rows. Per block of 64 slots, with S the scores and P the weights:

    rows of block n are there | S = q k^T starts, the copy of block n + 1 starts | S is there | softmax | P v starts | P v is there

so a copy has the time of one S, one softmax and one P v. Each group computes half of the columns of S and half of the columns of P v: in
mla.py's kernel both compute all of S, and the copy of the next block starts after P v has, too late to be hidden. No matrix instruction is
in flight when a block ends: the assembler would make all of them wait for one another.

Source: as mla.py; Jiashi Li, "FlashMLA" (2025), for 64 rows by 64 slots held by two groups.
"""

from __future__ import annotations

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from gristmill_kernels.triton import mla
from gristmill_kernels.triton.attention_parts import first_item, log2_e
from gristmill_kernels.triton.launch import Kernel

_first_item, _storage, _room = gluon.jit(first_item.fn), gluon.jit(mla._storage.fn), gluon.jit(mla._room.fn)


@gluon.jit
def _request_of_item(indptr, item, batch, STEP: gl.constexpr):
    """What attention_parts.request_of_item gives; a list of numbers needs a layout here."""
    lanes: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    before = 0
    for first in range(0, batch, 256):
        request = first + gl.arange(0, 256, layout=lanes)
        end = gl.load(indptr + request + 1, mask=request < batch, other=0)
        done = (end // STEP + request + 1 <= item) & (request < batch)
        before += gl.sum(done.to(gl.int32), axis=0)
    return before


@gluon.jit
def _gather(kv_smem, k_r_smem, slot_smem, kv_cache, slots, slots_r, cache_slot, wide: gl.constexpr, narrow: gl.constexpr):
    """Start copying the rows of one block, and note its slots; rows of slot -1 become zero."""
    LATENT: gl.constexpr = kv_smem.shape[1]
    latent = gl.arange(0, LATENT, layout=gl.SliceLayout(0, wide))
    rope = gl.arange(0, k_r_smem.shape[1], layout=gl.SliceLayout(0, narrow))
    at = kv_cache + slots.to(gl.int64)[:, None] * cache_slot + latent[None, :]
    async_copy.async_copy_global_to_shared(kv_smem, at, mask=(slots >= 0)[:, None])
    at_r = kv_cache + slots_r.to(gl.int64)[:, None] * cache_slot + (LATENT + rope[None, :])
    async_copy.async_copy_global_to_shared(k_r_smem, at_r, mask=(slots_r >= 0)[:, None])
    async_copy.commit_group()
    slot_smem.store(slots)


@gluon.jit
def _scores(q_smem, q_r_smem, kv_smem, k_r_smem, zero):
    """Start the products of the queries with the rows of one block: two groups of matrix instructions."""
    running = warpgroup_mma(q_smem, kv_smem.permute((1, 0)), zero, use_acc=False, is_async=True)
    return warpgroup_mma(q_r_smem, k_r_smem.permute((1, 0)), running, is_async=True)


@gluon.jit
def _slots(list_at, first, stop, BLOCK_N: gl.constexpr, layout: gl.constexpr):
    """Slots of one block; -1 from `stop` on."""
    place = first + gl.arange(0, BLOCK_N, layout=layout)
    return gl.load(list_at + place, mask=place < stop, other=-1)


@gluon.jit
def _finite(largest):
    """A maximum to subtract: 0 for rows that have seen nothing."""
    return gl.where(largest == float("-inf"), 0.0, largest)


@gluon.jit
def _both(largest, max_smem, layout: gl.constexpr):
    """The maximum of a row over what was and both halves of a block, in a layout of which one column stands for all."""
    both = gl.maximum(max_smem.slice(0, 1, 1).load(layout), max_smem.slice(1, 1, 1).load(layout))
    return gl.maximum(largest, both)


@gluon.jit
def _mla_hopper_kernel(
    partial, q_nope, q_rope, kv_cache, qo_indptr, kv_indptr, kv_indices, plan,
    nope_row: tl.int64, nope_head: tl.int64, rope_row: tl.int64, rope_head: tl.int64, cache_slot: tl.int64,
    batch: tl.int32, max_q_len: tl.int32, scale: tl.float32,
    NUM_HEADS: tl.constexpr, LATENT: tl.constexpr, ROPE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SPLIT: tl.constexpr,
):  # fmt: skip
    """The same partial results as of mla._mla_split_kernel.

    Maxima of rows are kept in three layouts: beside the scores, the sums, and the totals, of which each group holds its own half.
    """
    dtype: gl.constexpr = kv_cache.dtype.element_ty
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [gl.num_warps(), 1], [1, 0])
    narrow: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [gl.num_warps(), 1], [1, 0])
    score: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, BLOCK_N // 2, 16])
    value: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, rank=2)
    q_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, LATENT], swizzled)
    q_r_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, ROPE], swizzled)
    kv_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, LATENT], swizzled)
    k_r_smem = gl.allocate_shared_memory(dtype, [2, BLOCK_N, ROPE], swizzled)
    p_smem = gl.allocate_shared_memory(dtype, [BLOCK_M, BLOCK_N], swizzled)
    max_smem = gl.allocate_shared_memory(gl.float32, [BLOCK_M, 2], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    slot_smem = gl.allocate_shared_memory(gl.int32, [2, BLOCK_N], gl.SwizzledSharedLayout(1, 1, 1, [0]))

    items = gl.load(kv_indptr + batch) // SPLIT + batch
    room = _room(kv_indptr, plan, batch, SPLIT)
    for item in tl.range(gl.program_id(2), items, gl.num_programs(2), disable_licm=True):
        request = _request_of_item(kv_indptr, item, batch, SPLIT)
        begin = gl.load(kv_indptr + request)
        kv_len = gl.load(kv_indptr + request + 1) - begin
        start = (item - _first_item(kv_indptr, request, 1, SPLIT)) * SPLIT
        q_begin, q_len = request, 1
        if qo_indptr is not None:
            q_begin = gl.load(qo_indptr + request)
            q_len = gl.load(qo_indptr + request + 1) - q_begin
        base, rows_per_item = _storage(kv_indptr, plan, request, max_q_len, SPLIT)
        list_at = kv_indices + begin
        tiles = (q_len * NUM_HEADS + BLOCK_M - 1) // BLOCK_M
        if (start < 0) | (start >= kv_len):
            tiles = 0
        for tile in tl.range(gl.program_id(1), tiles, gl.num_programs(1), disable_licm=True):
            last_position = kv_len - q_len + gl.minimum((tile * BLOCK_M + BLOCK_M - 1) // NUM_HEADS, q_len - 1)
            stop = gl.minimum(gl.minimum(start + SPLIT, kv_len), last_position + 1)
            if start < stop:
                slots = _slots(list_at, start, stop, BLOCK_N, gl.SliceLayout(1, wide))
                slots_r = _slots(list_at, start, stop, BLOCK_N, gl.SliceLayout(1, narrow))
                _gather(kv_smem.index(0), k_r_smem.index(0), slot_smem.index(0), kv_cache, slots, slots_r, cache_slot, wide, narrow)
                slots = _slots(list_at, start + BLOCK_N, stop, BLOCK_N, gl.SliceLayout(1, wide))
                slots_r = _slots(list_at, start + BLOCK_N, stop, BLOCK_N, gl.SliceLayout(1, narrow))

                row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, wide))
                token, head = row // NUM_HEADS, row % NUM_HEADS
                latent = gl.arange(0, LATENT, layout=gl.SliceLayout(0, wide))
                q_at = (
                    q_nope + (q_begin + token).to(gl.int64)[:, None] * nope_row + head.to(gl.int64)[:, None] * nope_head + latent[None, :]
                )
                q_smem.store(gl.load(q_at, mask=(token < q_len)[:, None], other=0.0))
                row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, narrow))
                token, head = row // NUM_HEADS, row % NUM_HEADS
                rope = gl.arange(0, ROPE, layout=gl.SliceLayout(0, narrow))
                q_r_at = (
                    q_rope + (q_begin + token).to(gl.int64)[:, None] * rope_row + head.to(gl.int64)[:, None] * rope_head + rope[None, :]
                )
                q_r_smem.store(gl.load(q_r_at, mask=(token < q_len)[:, None], other=0.0))

                row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, score))
                token = row // NUM_HEADS
                position = kv_len - q_len + token
                offset = gl.arange(0, BLOCK_N, layout=gl.SliceLayout(0, score))
                factor = scale * log2_e
                zero = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, score)
                halves: gl.constexpr = gl.max(gl.reshape(zero, [BLOCK_M, 2, BLOCK_N // 2]), 2).type.layout
                largest = gl.full([BLOCK_M, 1], float("-inf"), gl.float32, score)
                largest_v = gl.full([BLOCK_M, 1], float("-inf"), gl.float32, value)
                largest_t = gl.full([BLOCK_M, 1], float("-inf"), gl.float32, halves)
                total = gl.full([BLOCK_M, 2], 0.0, gl.float32, halves)
                sums = gl.zeros([BLOCK_M, LATENT], gl.float32, value)
                for block in tl.range(start, stop, BLOCK_N, disable_licm=True):
                    buffer = ((block - start) // BLOCK_N) & 1
                    async_copy.wait_group(0)
                    fence_async_shared()
                    gl.thread_barrier()
                    running = _scores(q_smem, q_r_smem, kv_smem.index(buffer), k_r_smem.index(buffer), zero)
                    other = buffer ^ 1
                    _gather(
                        kv_smem.index(other),
                        k_r_smem.index(other),
                        slot_smem.index(other),
                        kv_cache,
                        slots,
                        slots_r,
                        cache_slot,
                        wide,
                        narrow,
                    )
                    slots = _slots(list_at, block + 2 * BLOCK_N, stop, BLOCK_N, gl.SliceLayout(1, wide))
                    slots_r = _slots(list_at, block + 2 * BLOCK_N, stop, BLOCK_N, gl.SliceLayout(1, narrow))
                    scores = warpgroup_mma_wait(0, deps=[running])
                    there = slot_smem.index(buffer).load(gl.SliceLayout(0, score)) >= 0
                    scores = gl.where(there[None, :] & ((block + offset)[None, :] <= position[:, None]), scores, float("-inf"))
                    max_smem.store(gl.max(gl.reshape(scores, [BLOCK_M, 2, BLOCK_N // 2]), 2))
                    gl.thread_barrier()
                    new_largest = _both(largest, max_smem, score)
                    new_largest_v = _both(largest_v, max_smem, value)
                    new_largest_t = _both(largest_t, max_smem, halves)
                    weights = gl.exp2(scores * factor - _finite(new_largest * factor))
                    sums = sums * gl.exp2(largest_v * factor - _finite(new_largest_v * factor))
                    p_smem.store(weights.to(dtype))
                    fence_async_shared()
                    gl.thread_barrier()
                    adding = warpgroup_mma(p_smem, kv_smem.index(buffer), sums, is_async=True)
                    rescale = gl.exp2(largest_t * factor - _finite(new_largest_t * factor))
                    total = total * rescale + gl.sum(gl.reshape(weights, [BLOCK_M, 2, BLOCK_N // 2]), 2)
                    largest, largest_v, largest_t = new_largest, new_largest_v, new_largest_t
                    sums = warpgroup_mma_wait(0, deps=[adding])
                async_copy.wait_group(0)
                all_total = gl.convert_layout(gl.sum(total, 1), gl.SliceLayout(1, score))

                maxima = partial + room * rows_per_item * (NUM_HEADS * LATENT)
                totals = maxima + room * rows_per_item * NUM_HEADS
                entry = ((base + start // SPLIT) * rows_per_item + token) * NUM_HEADS + row % NUM_HEADS
                gl.store(maxima + entry, gl.max(largest, 1) * factor, mask=token < q_len)
                gl.store(totals + entry, all_total, mask=token < q_len)
                row = tile * BLOCK_M + gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, value))
                token = row // NUM_HEADS
                latent = gl.arange(0, LATENT, layout=gl.SliceLayout(0, value))
                entry = ((base + start // SPLIT) * rows_per_item + token) * NUM_HEADS + row % NUM_HEADS
                gl.store(partial + entry[:, None] * LATENT + latent[None, :], sums, mask=(token < q_len)[:, None])


split = Kernel(_mla_hopper_kernel)

"""Decode attention in Triton: split-KV over (split of a request, KV head), the query heads of a group packed into the rows of one product,
then a merge of the splits. Rows of K and V are gathered one slot at a time through kv_indices.

Promise: lists are cut at multiples of the table's `split_tokens`, counted from the start of a request's list, blocks at multiples of
`block_n`, and splits are merged in order, so a row is the same bit for bit whatever its neighbours, the plan or the number of programs.
Two architectures, or two tables, may differ in the last bits, and so may the same row computed by extend_attention.

Source: Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018); Dao et al., Flash-Decoding (2023).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.schema import AttentionKey
from gristmill_kernels.triton import attention_tables, launch
from gristmill_kernels.triton.attention_parts import (
    first_item,
    head_blocks,
    ln_2,
    log2_e,
    request_of_item,
    soft_cap,
    softmax_step,
    supports_attention,
)
from gristmill_kernels.triton.attention_tables import DecodeConfig
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options


@triton.jit
def decode_split_kernel(
    partial, q, k_cache, v_cache, kv_indptr, kv_indices,
    q_row: tl.int64, q_head: tl.int64, k_slot: tl.int64, k_head: tl.int64, v_slot: tl.int64, v_head: tl.int64,
    batch: tl.int32, max_items: tl.int32, window_left: tl.int32, scale: tl.float32, logit_cap: tl.float32,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    SPLIT: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """Partial results of every item: float32 [max_items, Hq, Dv] weighted sums, then [max_items, Hq] maxima (powers of 2) and totals."""
    items = tl.load(kv_indptr + batch) // SPLIT + batch
    num_heads: tl.constexpr = NUM_KV_HEADS * GROUP
    member = tl.arange(0, BLOCK_M)
    dim, dim_v, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    maxima = partial + max_items.to(tl.int64) * (num_heads * HEAD_DIM_V)
    totals = maxima + max_items.to(tl.int64) * num_heads
    # Scores become powers of 2; a cap needs them in natural units first.
    factor = log2_e if CAP else scale * log2_e
    for work in tl.range(tl.program_id(0), items * NUM_KV_HEADS, tl.num_programs(0), num_stages=1, disable_licm=True):
        item = work // NUM_KV_HEADS
        head = work % NUM_KV_HEADS
        request = request_of_item(kv_indptr, item, batch, 1, SPLIT)
        begin = tl.load(kv_indptr + request)
        kv_len = tl.load(kv_indptr + request + 1) - begin
        start = (item - first_item(kv_indptr, request, 1, SPLIT)) * SPLIT
        stop = tl.minimum(start + SPLIT, kv_len)
        first_seen = 0
        if WINDOW:
            first_seen = tl.maximum(kv_len - 1 - window_left, 0)
        if (start >= 0) & (tl.maximum(start, first_seen) < stop):
            heads = head * GROUP + member
            q_at = q + request.to(tl.int64) * q_row + heads[:, None].to(tl.int64) * q_head
            q_1 = tl.load(q_at + dim[None, :], mask=(member[:, None] < GROUP) & (dim[None, :] < HEAD_DIM), other=0.0)
            if BLOCK_D2 > 0:
                dim_2 = BLOCK_D + tl.arange(0, BLOCK_D2)
                q_2 = tl.load(q_at + dim_2[None, :], mask=(member[:, None] < GROUP) & (dim_2[None, :] < HEAD_DIM), other=0.0)
            largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
            total = tl.zeros([BLOCK_M], tl.float32)
            sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
            list_at = kv_indices + begin
            k_at, v_at = k_cache + head.to(tl.int64) * k_head, v_cache + head.to(tl.int64) * v_head
            low = start
            if WINDOW:
                low = tl.maximum(start, first_seen // BLOCK_N * BLOCK_N)
            # The slots of a block are read one block ahead, so that no gather waits for its addresses.
            slots = tl.load(list_at + low + offset, mask=low + offset < stop, other=-1)
            for block in tl.range(low, stop, BLOCK_N, disable_licm=True):
                seen = slots >= 0
                if WINDOW:
                    seen = seen & (block + offset >= first_seen)
                rows = slots.to(tl.int64)
                k_rows = k_at + rows[:, None] * k_slot
                k_1 = tl.load(k_rows + dim[None, :], mask=seen[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
                v = tl.load(v_at + rows[:, None] * v_slot + dim_v[None, :], mask=seen[:, None] & (dim_v[None, :] < HEAD_DIM_V), other=0.0)
                following = block + BLOCK_N + offset
                slots = tl.load(list_at + following, mask=following < stop, other=-1)
                scores = tl.dot(q_1, tl.trans(k_1.to(q_1.dtype)), input_precision="ieee")
                if BLOCK_D2 > 0:
                    k_2 = tl.load(k_rows + dim_2[None, :], mask=seen[:, None] & (dim_2[None, :] < HEAD_DIM), other=0.0)
                    scores = tl.dot(q_2, tl.trans(k_2.to(q_1.dtype)), scores, input_precision="ieee")
                if CAP:
                    scores = soft_cap(scores * scale, logit_cap)
                scores = tl.where(seen[None, :], scores, float("-inf"))
                weights, rescale, largest, total = softmax_step(scores, largest, total, factor)
                sums = tl.dot(weights.to(q_1.dtype), v.to(q_1.dtype), sums * rescale[:, None], input_precision="ieee")
            entry = item.to(tl.int64) * num_heads + heads
            tl.store(
                partial + entry[:, None] * HEAD_DIM_V + dim_v[None, :], sums,
                mask=(member[:, None] < GROUP) & (dim_v[None, :] < HEAD_DIM_V),
            )  # fmt: skip
            tl.store(maxima + entry, largest * factor, mask=member < GROUP)
            tl.store(totals + entry, total, mask=member < GROUP)


@triton.jit
def decode_merge_kernel(
    out, lse, partial, kv_indptr, sinks,
    out_row: tl.int64, out_head: tl.int64,
    max_items: tl.int32, window_left: tl.int32, lse_row: tl.int32, v_scale: tl.float32,
    NUM_HEADS: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_DV: tl.constexpr, BLOCK_SPLITS: tl.constexpr, SPLIT: tl.constexpr,
    WINDOW: tl.constexpr,
):  # fmt: skip
    """Combine the splits of one (request, query head) in ascending order and normalise."""
    request, head = tl.program_id(0), tl.program_id(1)
    begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - begin
    low = 0
    if WINDOW:
        low = tl.maximum(kv_len - 1 - window_left, 0) // SPLIT
    high = (kv_len + SPLIT - 1) // SPLIT
    maxima = partial + max_items.to(tl.int64) * (NUM_HEADS * HEAD_DIM_V)
    totals = maxima + max_items.to(tl.int64) * NUM_HEADS
    item_0 = first_item(kv_indptr, request, 1, SPLIT).to(tl.int64)
    dim_v, split = tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_SPLITS)
    largest, total = tl.full([1], float("-inf"), tl.float32), tl.zeros([1], tl.float32)
    if sinks is not None:
        largest = tl.full([1], 0.0, tl.float32) + tl.load(sinks + head) * log2_e
        total = tl.where(largest == float("-inf"), 0.0, 1.0)
    sums = tl.zeros([BLOCK_DV], tl.float32)
    for first in range(low, high, BLOCK_SPLITS):
        entry = (item_0 + first + split) * NUM_HEADS + head
        there = first + split < high
        part_largest = tl.load(maxima + entry, mask=there, other=float("-inf"))
        part_total = tl.load(totals + entry, mask=there, other=0.0)
        part = tl.load(
            partial + entry[:, None] * HEAD_DIM_V + dim_v[None, :], mask=there[:, None] & (dim_v[None, :] < HEAD_DIM_V), other=0.0
        )
        new_largest = tl.maximum(largest, tl.max(part_largest, 0))
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        weight = tl.exp2(part_largest - base)
        rescale = tl.exp2(largest - base)
        sums = sums * rescale + tl.sum(part * weight[:, None], 0)
        total = total * rescale + tl.sum(part_total * weight, 0)
        largest = new_largest
    result = sums / tl.where(total == 0.0, 1.0, total) * v_scale
    out_at = out + request.to(tl.int64) * out_row + head.to(tl.int64) * out_head
    tl.store(out_at + dim_v, result.to(out.dtype.element_ty), mask=dim_v < HEAD_DIM_V)
    if lse is not None:
        lse_at = lse + request.to(tl.int64) * lse_row + head + tl.arange(0, 1)
        tl.store(lse_at, (largest + tl.log2(total)) * ln_2)


_split = Kernel(decode_split_kernel)
_merge = Kernel(decode_merge_kernel)

# Splits that the merge reads at once.
_MERGE_SPLITS = 16


def decode_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sinks: Tensor | None,
    plan: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """As the public function. A plan is not needed: work is spread on the device; its workspace is used when it is large enough."""
    _, num_heads, head_dim = q.shape
    _, num_kv_heads, head_dim_v = v_cache.shape
    arch = launch.facts(q.device).arch
    config = attention_tables.decode_config(arch, q.dtype, k_cache.dtype, head_dim, head_dim_v, num_heads // num_kv_heads)
    decode_with(
        config, out, lse, q, k_cache, v_cache, kv_indptr, kv_indices, sinks, workspace,
        sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip


def decode_with(
    config: DecodeConfig,
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    sinks: Tensor | None,
    workspace: Tensor | None,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """`decode_attention` in a given configuration: what the tuner times."""
    batch, num_heads, head_dim = q.shape
    if not batch:
        return
    _, num_kv_heads, head_dim_v = v_cache.shape
    max_items = kv_indices.shape[0] // config.split_tokens + batch
    needed = max_items * num_heads * (head_dim_v + 2)
    if workspace is None or workspace.numel() < needed:
        workspace = torch.empty(needed, dtype=torch.float32, device=q.device)
    programs = min(max_items * num_kv_heads, launch.facts(q.device).num_processors * config.programs_per_processor)
    strides = (q.stride(0), q.stride(1), k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1))
    _split(
        (programs, 1, 1),
        (
            workspace, q, k_cache, v_cache, kv_indptr, kv_indices,
            *strides, batch, max_items, window_left, sm_scale * k_scale, logit_cap,
        ),
        split_constants(head_dim, head_dim_v, num_heads, num_kv_heads, config, window_left >= 0, logit_cap > 0 or sm_scale <= 0),
        config.options,
    )  # fmt: skip
    _merge(
        (batch, num_heads, 1),
        (
            out, lse, workspace, kv_indptr, sinks, out.stride(0), out.stride(1),
            max_items, window_left, 0 if lse is None else lse.stride(0), v_scale,
        ),
        (num_heads, head_dim_v, launch.next_power_of_2(head_dim_v), _MERGE_SPLITS, config.split_tokens, window_left >= 0),
        Options(num_warps=4, num_stages=2),
    )  # fmt: skip


def split_constants(
    head_dim: int, head_dim_v: int, num_heads: int, num_kv_heads: int, config: DecodeConfig, window: bool, cap: bool
) -> tuple:
    """Constants of the split kernel, in its order."""
    group = num_heads // num_kv_heads
    block_m = max(16, launch.next_power_of_2(group))
    blocks = (block_m, config.block_n, *head_blocks(head_dim), max(16, launch.next_power_of_2(head_dim_v)))
    return (num_kv_heads, group, head_dim, head_dim_v, *blocks, config.split_tokens, window, cap)


def supports(key: AttentionKey) -> str | None:
    """Any head size up to 576 and any group up to 128 heads."""
    return supports_attention(key)


OPS = {"decode_attention": Op(decode_attention, supports)}

_BF16, _INT, _WIDE = torch.bfloat16, torch.int32, torch.float32


def _aot(
    label: str, head_dim: int, head_dim_v: int, heads: tuple[int, int], archs: tuple[str, ...], cache: torch.dtype = _BF16
) -> list[AotCase]:
    """The default configuration of every arch, each as a case of its own, since block sizes differ."""
    cases = []
    for arch in archs:
        config = attention_tables.decode_config(arch, _BF16, cache, head_dim, head_dim_v, heads[0] // heads[1])
        constants = split_constants(head_dim, head_dim_v, *heads, config, False, False)
        cases.append(AotCase(f"{label}-{arch}", _split, (_WIDE, _BF16, cache, cache, _INT, _INT), constants, config.options, True, (arch,)))
    return cases


_ARCHS = ("gfx90a", "gfx942", "gfx950", "sm90")
AOT = [
    *_aot("128", 128, 128, (32, 8), _ARCHS),
    *_aot("64", 64, 64, (16, 2), ("gfx942", "sm90")),
    *_aot("fp8", 128, 128, (32, 8), ("gfx942", "gfx950", "sm90"), torch.float8_e4m3fn),
    AotCase("128", _merge, (_BF16, _WIDE, _WIDE, _INT, None), (32, 128, 128, _MERGE_SPLITS, 256, False), Options(4, 2)),
]

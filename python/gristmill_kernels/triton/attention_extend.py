"""Extend attention in Triton: tiles of query rows of one request and KV head against its keys, gathered slot by slot through kv_indices or,
for ragged_attention, read from contiguous rows. The query heads of a group are packed into the rows of a tile (row = token * group +
member), so that a tile spans few positions: less is wasted on the diagonal, and a short chunk still fills a product.

Blocks of keys are cut at multiples of `block_n` from position 0; blocks no row of a tile sees are skipped; blocks every row sees are not
masked. A masked-out block changes no bit of a row, so rows do not depend on how a prompt was cut into chunks or on their neighbours.

Source: Dao, "FlashAttention-2" (2023).
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
from gristmill_kernels.triton.attention_tables import ExtendConfig
from gristmill_kernels.triton.launch import AotCase, Kernel, Op


@triton.jit
def _extend_blocks(
    sums, largest, total, low, high, q_1, q_2, k_at, v_at, list_at, mask_at, k_slot, v_slot,
    position, first_seen, end_seen, window_left, scale, factor, logit_cap,
    HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr,
    BLOCK_DV: tl.constexpr, PAGED: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """The blocks [low, high) of one tile, whose rows see keys of [first_seen, end_seen) only: others may hold NaN and are not read.
    Without MASKED every row sees every key of these blocks, and none is a hole."""
    dim, dim_v, offset = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV), tl.arange(0, BLOCK_N)
    if PAGED:
        slots = tl.load(list_at + low + offset, mask=low + offset < end_seen, other=-1)
    for block in tl.range(low, high, BLOCK_N, disable_licm=True):
        key = block + offset
        if PAGED:
            rows = slots.to(tl.int64)
            there = slots >= 0
        else:
            rows = key.to(tl.int64)
            there = key < end_seen
        if MASKED and WINDOW:
            there = there & (key >= first_seen)
        k_rows = k_at + rows[:, None] * k_slot
        v_rows = v_at + rows[:, None] * v_slot
        if MASKED:
            k_1 = tl.load(k_rows + dim[None, :], mask=there[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
            v = tl.load(v_rows + dim_v[None, :], mask=there[:, None] & (dim_v[None, :] < HEAD_DIM_V), other=0.0)
        else:
            k_1 = _load_columns(k_rows, dim, HEAD_DIM, BLOCK_D)
            v = _load_columns(v_rows, dim_v, HEAD_DIM_V, BLOCK_DV)
        scores = tl.dot(q_1, tl.trans(k_1.to(q_1.dtype)), input_precision="ieee")
        if BLOCK_D2 > 0:
            dim_2 = BLOCK_D + tl.arange(0, BLOCK_D2)
            columns = dim_2[None, :] < HEAD_DIM
            k_2 = tl.load(k_rows + dim_2[None, :], mask=there[:, None] & columns if MASKED else columns, other=0.0)
            scores = tl.dot(q_2, tl.trans(k_2.to(q_1.dtype)), scores, input_precision="ieee")
        if CAP:
            scores = soft_cap(scores * scale, logit_cap)
        if MASKED:
            seen = tl.broadcast_to(there[None, :], scores.shape)
            if CAUSAL:
                seen = seen & (key[None, :] <= position[:, None])
            if WINDOW:
                seen = seen & (key[None, :] >= position[:, None] - window_left)
            if mask_at is not None:
                seen = seen & (tl.load(mask_at[:, None] + key[None, :], mask=seen, other=0) != 0)
                v = tl.where((tl.max(seen.to(tl.int32), 0) > 0)[:, None], v, 0.0)
            scores = tl.where(seen, scores, float("-inf"))
        weights, rescale, largest, total = softmax_step(scores, largest, total, factor)
        sums = tl.dot(weights.to(q_1.dtype), v.to(q_1.dtype), sums * rescale[:, None], input_precision="ieee")
        if PAGED:
            following = block + BLOCK_N + offset
            slots = tl.load(list_at + following, mask=following < end_seen, other=-1)
    return sums, largest, total


@triton.jit
def _load_columns(rows, dim, WIDTH: tl.constexpr, BLOCK: tl.constexpr):
    if WIDTH == BLOCK:
        return tl.load(rows + dim[None, :])
    return tl.load(rows + dim[None, :], mask=dim[None, :] < WIDTH, other=0.0)


@triton.jit
def _lowest(list_at, low, high, BLOCK: tl.constexpr):
    """The smallest of list_at[low:high], at most 0."""
    lowest = tl.zeros([BLOCK], tl.int32)
    for first in range(low, high, BLOCK):
        place = first + tl.arange(0, BLOCK)
        lowest = tl.minimum(lowest, tl.load(list_at + place, mask=place < high, other=0))
    return tl.min(lowest, 0)


@triton.jit
def extend_kernel(
    out, lse, q, k, v, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, sinks,
    out_row: tl.int64, out_head: tl.int64, q_row: tl.int64, q_head: tl.int64,
    k_slot: tl.int64, k_head: tl.int64, v_slot: tl.int64, v_head: tl.int64,
    batch: tl.int32, tiles: tl.int32, window_left: tl.int32, lse_row: tl.int32,
    scale: tl.float32, logit_cap: tl.float32, v_scale: tl.float32,
    NUM_KV_HEADS: tl.constexpr, GROUP: tl.constexpr, HEAD_DIM: tl.constexpr, HEAD_DIM_V: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D2: tl.constexpr, BLOCK_DV: tl.constexpr,
    HEAD_MAJOR: tl.constexpr, CAUSAL: tl.constexpr, WINDOW: tl.constexpr, CAP: tl.constexpr,
):  # fmt: skip
    """One tile of BLOCK_M rows; the longest tiles of a request go first."""
    program = tl.program_id(0)
    if HEAD_MAJOR:
        head = program // tiles
        tile = tiles - 1 - program % tiles
    else:
        head = program % NUM_KV_HEADS
        tile = tiles - 1 - program // NUM_KV_HEADS
    request = request_of_item(qo_indptr, tile, batch, GROUP, BLOCK_M)
    if request >= batch:
        return
    q_begin = tl.load(qo_indptr + request)
    q_len = tl.load(qo_indptr + request + 1) - q_begin
    first_row = (tile - first_item(qo_indptr, request, GROUP, BLOCK_M)) * BLOCK_M
    if (first_row < 0) | (first_row >= q_len * GROUP):
        return
    kv_begin = tl.load(kv_indptr + request)
    kv_len = tl.load(kv_indptr + request + 1) - kv_begin
    before = kv_len - q_len

    row = first_row + tl.arange(0, BLOCK_M)
    token = row // GROUP
    heads = head * GROUP + row % GROUP
    valid = token < q_len
    position = before + token
    first_position = before + first_row // GROUP
    last_position = before + tl.minimum((first_row + BLOCK_M - 1) // GROUP, q_len - 1)
    # [low, high) is what some row sees, [full_low, full_high) what every row sees; both cut at multiples of BLOCK_N.
    low, high, first_seen = 0, kv_len, 0
    full_low, full_high = 0, kv_len // BLOCK_N * BLOCK_N
    if CAUSAL:
        high = tl.minimum(kv_len, last_position + 1)
        full_high = tl.minimum(full_high, tl.maximum(first_position + 1, 0) // BLOCK_N * BLOCK_N)
    if WINDOW:
        first_seen = tl.maximum(first_position - window_left, 0)
        low = first_seen // BLOCK_N * BLOCK_N
        full_low = (tl.maximum(last_position - window_left, 0) + BLOCK_N - 1) // BLOCK_N * BLOCK_N
    if custom_mask is not None:
        full_high = low
    full_low = tl.minimum(full_low, tl.maximum(high, low))
    PAGED: tl.constexpr = kv_indices is not None
    if PAGED:  # noqa: SIM102 - a constant and a run-time condition
        # Looking once for holes is cheaper than a mask in every block.
        if _lowest(kv_indices + kv_begin, full_low, full_high, 1024) < 0:
            full_high = full_low
    full_high = tl.maximum(full_high, full_low)

    dim, dim_v = tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_DV)
    q_at = q + (q_begin + token).to(tl.int64)[:, None] * q_row + heads.to(tl.int64)[:, None] * q_head
    q_1 = tl.load(q_at + dim[None, :], mask=valid[:, None] & (dim[None, :] < HEAD_DIM), other=0.0)
    q_2 = q_1
    if BLOCK_D2 > 0:
        dim_2 = BLOCK_D + tl.arange(0, BLOCK_D2)
        q_2 = tl.load(q_at + dim_2[None, :], mask=valid[:, None] & (dim_2[None, :] < HEAD_DIM), other=0.0)
    k_at, v_at = k + head.to(tl.int64) * k_head, v + head.to(tl.int64) * v_head
    list_at = kv_indices
    if PAGED:
        list_at = kv_indices + kv_begin
    else:
        k_at += kv_begin.to(tl.int64) * k_slot
        v_at += kv_begin.to(tl.int64) * v_slot
    mask_at = None
    if custom_mask is not None:
        mask_at = custom_mask + (tl.load(mask_indptr + request).to(tl.int64) + tl.minimum(token, q_len - 1).to(tl.int64) * kv_len)

    # A sink is one more logit of value 0: it is where the maximum and the total begin.
    factor = log2_e if CAP else scale * log2_e
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    sums = tl.zeros([BLOCK_M, BLOCK_DV], tl.float32)
    if WINDOW:
        sums, largest, total = _extend_blocks(
            sums, largest, total, low, full_low, q_1, q_2, k_at, v_at, list_at, mask_at, k_slot, v_slot,
            position, first_seen, high, window_left, scale, factor, logit_cap,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGED, CAUSAL, WINDOW, CAP, True,
        )  # fmt: skip
    if custom_mask is None:
        sums, largest, total = _extend_blocks(
            sums, largest, total, full_low, full_high, q_1, q_2, k_at, v_at, list_at, mask_at, k_slot, v_slot,
            position, first_seen, high, window_left, scale, factor, logit_cap,
            HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGED, CAUSAL, WINDOW, CAP, False,
        )  # fmt: skip
    sums, largest, total = _extend_blocks(
        sums, largest, total, full_high, high, q_1, q_2, k_at, v_at, list_at, mask_at, k_slot, v_slot,
        position, first_seen, high, window_left, scale, factor, logit_cap,
        HEAD_DIM, HEAD_DIM_V, BLOCK_N, BLOCK_D, BLOCK_D2, BLOCK_DV, PAGED, CAUSAL, WINDOW, CAP, True,
    )  # fmt: skip

    largest = tl.where(largest == float("-inf"), largest, largest * factor)
    if sinks is not None:
        sink = tl.load(sinks + heads, mask=valid, other=float("-inf")) * log2_e
        new_largest = tl.maximum(largest, sink)
        base = tl.where(new_largest == float("-inf"), 0.0, new_largest)
        rescale = tl.exp2(largest - base)
        total = total * rescale + tl.exp2(sink - base)
        sums = sums * rescale[:, None]
        largest = new_largest
    result = sums * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    out_at = out + (q_begin + token).to(tl.int64)[:, None] * out_row + heads.to(tl.int64)[:, None] * out_head
    tl.store(out_at + dim_v[None, :], result.to(out.dtype.element_ty), mask=valid[:, None] & (dim_v[None, :] < HEAD_DIM_V))
    if lse is not None:
        tl.store(lse + (q_begin + token).to(tl.int64) * lse_row + heads, (largest + tl.log2(total)) * ln_2, mask=valid)


_extend = Kernel(extend_kernel)


def extend_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """As the public function."""
    config = attention_tables.extend_config(launch.facts(q.device).arch, q.dtype, k_cache.dtype, q.shape[2], v_cache.shape[2])
    extend_with(
        config, out, lse, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, sinks,
        causal, sm_scale, logit_cap, window_left, k_scale, v_scale,
    )  # fmt: skip


def ragged_attention(
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
) -> None:
    """As the public function: the same tiles over contiguous keys."""
    config = attention_tables.extend_config(launch.facts(q.device).arch, q.dtype, k.dtype, q.shape[2], v.shape[2], True)
    extend_with(
        config, out, lse, q, k, v, qo_indptr, kv_indptr, None, custom_mask, mask_indptr, sinks,
        causal, sm_scale, logit_cap, window_left, 1.0, 1.0,
    )  # fmt: skip


def extend_with(
    config: ExtendConfig,
    out: Tensor,
    lse: Tensor | None,
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    qo_indptr: Tensor,
    kv_indptr: Tensor,
    kv_indices: Tensor | None,
    custom_mask: Tensor | None,
    mask_indptr: Tensor | None,
    sinks: Tensor | None,
    causal: bool,
    sm_scale: float,
    logit_cap: float,
    window_left: int,
    k_scale: float,
    v_scale: float,
) -> None:
    """Either op in a given configuration: what the tuner times. Without kv_indices keys and values are contiguous rows."""
    batch = qo_indptr.shape[0] - 1
    rows, num_heads, head_dim = q.shape
    if batch <= 0 or not rows:
        return
    _, num_kv_heads, head_dim_v = v_cache.shape
    group = num_heads // num_kv_heads
    tiles = rows * group // config.block_m + batch
    strides = (
        out.stride(0), out.stride(1), q.stride(0), q.stride(1),
        k_cache.stride(0), k_cache.stride(1), v_cache.stride(0), v_cache.stride(1),
    )  # fmt: skip
    _extend(
        (tiles * num_kv_heads, 1, 1),
        (
            out, lse, q, k_cache, v_cache, qo_indptr, kv_indptr, kv_indices, custom_mask, mask_indptr, sinks, *strides,
            batch, tiles, window_left, 0 if lse is None else lse.stride(0), sm_scale * k_scale, logit_cap, v_scale,
        ),
        extend_constants(
            head_dim, head_dim_v, num_heads, num_kv_heads, config,
            causal and custom_mask is None, window_left >= 0, logit_cap > 0 or sm_scale <= 0, v_cache.dtype,
        ),
        config.options,
    )  # fmt: skip


def extend_constants(
    head_dim: int,
    head_dim_v: int,
    num_heads: int,
    num_kv_heads: int,
    config: ExtendConfig,
    causal: bool,
    window: bool,
    cap: bool,
    cache: torch.dtype,
) -> tuple:
    """Constants of the extend kernel, in its order."""
    # 8-bit values in blocks of fewer than 64 columns come out wrong on sm90 (Triton 3.6.0; the interpreter agrees with the definition)
    block_v = max(64 if cache.itemsize == 1 else 16, launch.next_power_of_2(head_dim_v))
    blocks = (config.block_m, config.block_n, *head_blocks(head_dim), block_v)
    return (num_kv_heads, num_heads // num_kv_heads, head_dim, head_dim_v, *blocks, config.head_major, causal, window, cap)


def supports(key: AttentionKey) -> str | None:
    """Any head size up to 576 and any group up to 128 heads."""
    return supports_attention(key)


OPS = {"extend_attention": Op(extend_attention, supports), "ragged_attention": Op(ragged_attention, supports)}

_BF16, _INT = torch.bfloat16, torch.int32


def _aot(arch: str, head_dim: int, head_dim_v: int, heads: tuple[int, int], ragged: bool, cache: torch.dtype = _BF16) -> AotCase:
    config = attention_tables.extend_config(arch, _BF16, cache, head_dim, head_dim_v, ragged)
    constants = extend_constants(head_dim, head_dim_v, *heads, config, True, False, False, cache)
    types = (_BF16, torch.float32, _BF16, cache, cache, _INT, _INT, None if ragged else _INT, None, None, None)
    label = f"{'ragged' if ragged else 'paged'}-{head_dim}-{head_dim_v}-{cache.itemsize * 8}bit-{arch}"
    return AotCase(label, _extend, types, constants, config.options, True, (arch,))


AOT = [
    *(_aot(arch, 128, 128, (32, 8), ragged) for arch in ("gfx90a", "gfx942", "gfx950", "sm90") for ragged in (False, True)),
    *(_aot(arch, 192, 128, (16, 16), True) for arch in ("gfx942", "sm90")),
    *(_aot(arch, 128, 128, (32, 8), False, torch.float8_e4m3fn) for arch in ("gfx942", "sm90")),
]

"""Combining partial attention states in Triton, one program per a few (token, head) rows. Memory-bound: every state is read once.

Source: Liu et al., "Ring Attention" (2023); FlashInfer's recursive attention states.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.checks import FLOAT_DTYPES, name_of
from gristmill_kernels.schema import MergeKey
from gristmill_kernels.triton import launch
from gristmill_kernels.triton.attention_parts import ln_2, log2_e
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Options
from gristmill_kernels.triton.norm import wide_type

# Elements that one program holds of one state.
_BLOCK = 1024


@triton.jit
def merge_state_kernel(
    out, out_lse, o_a, lse_a, o_b, lse_b,
    out_row: tl.int64, out_head: tl.int64, a_row: tl.int64, a_head: tl.int64, b_row: tl.int64, b_head: tl.int64,
    rows: tl.int32, heads: tl.int32, out_lse_row: tl.int32, lse_a_row: tl.int32, lse_b_row: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = entry < rows.to(tl.int64) * heads
    row, head = entry // heads, entry % heads
    dim = tl.arange(0, BLOCK)
    mask = there[:, None] & (dim[None, :] < WIDTH)
    log_a = tl.load(lse_a + row * lse_a_row + head, mask=there, other=float("-inf"))
    log_b = tl.load(lse_b + row * lse_b_row + head, mask=there, other=float("-inf"))
    a = tl.load(o_a + (row * a_row + head * a_head)[:, None] + dim[None, :], mask=mask, other=0.0)
    b = tl.load(o_b + (row * b_row + head * b_head)[:, None] + dim[None, :], mask=mask, other=0.0)
    largest = tl.maximum(log_a, log_b)
    no_a, no_b = log_a == float("-inf"), log_b == float("-inf")
    base = tl.where(no_a & no_b, 0.0, largest)
    weight_a, weight_b = tl.exp2((log_a - base) * log2_e), tl.exp2((log_b - base) * log2_e)
    # What an empty state holds is anything, NaN too, and one that stands alone comes out bit for bit.
    part_a = tl.where((weight_a == 0.0)[:, None], 0.0, a.to(tl.float32) * weight_a[:, None])
    part_b = tl.where((weight_b == 0.0)[:, None], 0.0, b.to(tl.float32) * weight_b[:, None])
    total = weight_a + weight_b
    merged = ((part_a + part_b) / tl.where(total == 0.0, 1.0, total)[:, None]).to(out.dtype.element_ty)
    merged = tl.where((no_b & ~no_a)[:, None], a, tl.where((no_a & ~no_b)[:, None], b, merged))
    log = tl.where(no_b, log_a, tl.where(no_a, log_b, largest + tl.log2(total) * ln_2))
    tl.store(out + (row * out_row + head * out_head)[:, None] + dim[None, :], merged, mask=mask)
    tl.store(out_lse + row * out_lse_row + head, log, mask=there)


@triton.jit
def merge_states_kernel(
    out, out_lse, o, lse,
    out_row: tl.int64, out_head: tl.int64, o_state: tl.int64, o_row: tl.int64, o_head: tl.int64,
    states: tl.int32, rows: tl.int32, heads: tl.int32, out_lse_row: tl.int32, lse_state: tl.int32, lse_row: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Each (row, head) in one pass over its states; reads all of them before it writes, so the output may be one of them."""
    entry = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    there = entry < rows.to(tl.int64) * heads
    row, head = entry // heads, entry % heads
    dim = tl.arange(0, BLOCK)
    mask = there[:, None] & (dim[None, :] < WIDTH)
    lse_at = lse + row * lse_row + head
    largest = tl.full([ROWS], float("-inf"), tl.float32)
    for state in range(states):
        largest = tl.maximum(largest, tl.load(lse_at + lse_state.to(tl.int64) * state, mask=there, other=float("-inf")))
    base = tl.where(largest == float("-inf"), 0.0, largest)
    total = tl.zeros([ROWS], WIDE)
    sums = tl.zeros([ROWS, BLOCK], WIDE)
    for state in range(states):
        log = tl.load(lse_at + lse_state.to(tl.int64) * state, mask=there, other=float("-inf"))
        value = tl.load(o + (o_state * state + row * o_row + head * o_head)[:, None] + dim[None, :], mask=mask, other=0.0)
        # Exactly 1 for a state that stands alone, which therefore comes out bit for bit.
        weight = tl.exp2((log - base) * log2_e)
        # What an empty state holds is anything, NaN too.
        sums += tl.where((weight == 0.0)[:, None], 0.0, value.to(WIDE) * weight.to(WIDE)[:, None])
        total += weight.to(WIDE)
    merged = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    tl.store(out + (row * out_row + head * out_head)[:, None] + dim[None, :], merged.to(out.dtype.element_ty), mask=mask)
    tl.store(out_lse + row * out_lse_row + head, largest + tl.log2(total.to(tl.float32)) * ln_2, mask=there)


_merge_state = Kernel(merge_state_kernel)
_merge_states = Kernel(merge_states_kernel)


def merge_state(out: Tensor, out_lse: Tensor, o_a: Tensor, lse_a: Tensor, o_b: Tensor, lse_b: Tensor) -> None:
    rows, heads, width = o_a.shape
    constants = merge_constants(width)
    _merge_state(
        (launch.cdiv(rows * heads, constants[2]), 1, 1),
        (
            out, out_lse, o_a, lse_a, o_b, lse_b,
            out.stride(0), out.stride(1), o_a.stride(0), o_a.stride(1), o_b.stride(0), o_b.stride(1),
            rows, heads, out_lse.stride(0), lse_a.stride(0), lse_b.stride(0),
        ),
        constants,
        Options(num_warps=4, num_stages=1),
    )  # fmt: skip


def merge_states(out: Tensor, out_lse: Tensor, o: Tensor, lse: Tensor) -> None:
    states, rows, heads, width = o.shape
    constants = merge_constants(width)
    _merge_states(
        (launch.cdiv(rows * heads, constants[2]), 1, 1),
        (
            out, out_lse, o, lse, out.stride(0), out.stride(1), o.stride(0), o.stride(1), o.stride(2),
            states, rows, heads, out_lse.stride(0), lse.stride(0), lse.stride(1),
        ),
        (*constants, wide_type(o.dtype)),
        Options(num_warps=4, num_stages=2),
    )  # fmt: skip


def merge_constants(width: int) -> tuple[int, int, int]:
    """Width, columns and rows of one program."""
    block = launch.next_power_of_2(width)
    return width, block, max(1, _BLOCK // block)


def supports(key: MergeKey) -> str | None:
    return None if key.dtype in FLOAT_DTYPES else f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"


OPS = {"merge_state": Op(merge_state, supports), "merge_states": Op(merge_states, supports)}

_SHAPES = ((128, torch.bfloat16), (512, torch.float16), (72, torch.float32))
AOT = [
    *(AotCase(f"{width}", _merge_state, (dtype, torch.float32) * 3, merge_constants(width)) for width, dtype in _SHAPES),
    *(
        AotCase(f"{width}", _merge_states, (dtype, torch.float32) * 2, (*merge_constants(width), wide_type(dtype)))
        for width, dtype in _SHAPES
    ),
]

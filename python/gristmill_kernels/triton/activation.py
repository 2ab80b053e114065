"""Triton kernels of the gated activations: one program per piece of a row, or several short rows at once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.triton import launch, tables
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Rows, supports_float, wide_type

_MAX_BLOCK = 2048


@triton.jit
def _silu_times(gate, up):
    # exp(-|g|) as the square of exp(-|g| / 2), multiplied in one half at a time: it underflows long before the product does.
    half = tl.exp(-0.5 * tl.abs(gate))
    below = tl.where(gate < 0, half, 1.0)
    return gate * below / (1.0 + half * half) * up * below


@triton.jit
def _gelu_times(gate, up):
    return gate * 0.5 * (1.0 + tl.erf(gate * 0.7071067811865476)) * up


@triton.jit
def _gelu_tanh_times(gate, up):
    # (1 + tanh(z)) / 2 is the logistic function of 2 z; 2 sqrt(2 / pi) = 1.5957691216057308.
    inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    return gate / (1.0 + tl.exp(-inner)) * up


@triton.jit
def _swiglu_oai(gate, up, alpha, limit):
    # Comparisons, not minimum and maximum: a NaN must stay one.
    gate = tl.where(gate > limit, limit, gate)
    up = tl.where(up > limit, limit, tl.where(up < -limit, -limit, up))
    return gate / (1.0 + tl.exp(-alpha * gate)) * (up + 1.0)


@triton.jit
def _gate_kernel(
    out, x,
    out_outer: tl.int64, out_inner: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    inner: tl.int32, count: tl.int32, alpha: tl.float32, limit: tl.float32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    kept = rows < count
    outer_row, inner_row = (rows // inner).to(tl.int64), (rows % inner).to(tl.int64)
    x_row = x + (outer_row * x_outer + inner_row * x_inner)[:, None]
    mask = kept[:, None] & (cols < WIDTH)[None, :]
    if FORM == "swiglu_oai":  # gate and up alternate: read both, then part them
        both = tl.program_id(1) * (2 * BLOCK) + tl.arange(0, 2 * BLOCK)
        pairs = tl.load(x_row + both[None, :], mask=kept[:, None] & (both < 2 * WIDTH)[None, :], other=0.0)
        gate, up = tl.split(tl.reshape(pairs, (ROWS, BLOCK, 2)))
        result = _swiglu_oai(gate.to(WIDE), up.to(WIDE), alpha, limit)
    else:
        gate = tl.load(x_row + cols[None, :], mask=mask, other=0.0).to(WIDE)
        up = tl.load(x_row + (cols + WIDTH)[None, :], mask=mask, other=0.0).to(WIDE)
        if FORM == "silu":
            result = _silu_times(gate, up)
        elif FORM == "gelu":
            result = _gelu_times(gate, up)
        else:
            result = _gelu_tanh_times(gate, up)
    tl.store(out + (outer_row * out_outer + inner_row * out_inner)[:, None] + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


_gate = Kernel(_gate_kernel)


def _blocks(width: int) -> tuple[int, int]:
    """(columns, rows) of one program."""
    columns, rows = tables.row_block(width)
    return min(columns, _MAX_BLOCK), rows


def _launch(form: str, out: Tensor, x: Tensor, alpha: float = 1.0, limit: float = 0.0) -> None:
    def on_rows(rows: Rows, out: Tensor, x: Tensor) -> None:
        width = out.shape[-1]
        block, rows_at_once = _blocks(width)
        grid = (launch.cdiv(rows.total, rows_at_once), launch.cdiv(width, block), 1)
        args = (out, x, *rows.strides[0], *rows.strides[1], rows.inner, rows.total, alpha, limit)
        options = tables.row_options("gate", launch.facts(x.device), block * rows_at_once)
        _gate(grid, args, (width, block, rows_at_once, form, wide_type(x.dtype)), options)

    launch.over_rows(on_rows, out, x)


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    _launch("silu", out, x)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    _launch("gelu", out, x)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    _launch("gelu_tanh", out, x)


def swiglu_oai(out: Tensor, x: Tensor, alpha: float, limit: float) -> None:
    _launch("swiglu_oai", out, x, alpha, limit)


OPS = {
    "silu_and_mul": Op(silu_and_mul, supports_float),
    "gelu_and_mul": Op(gelu_and_mul, supports_float),
    "gelu_tanh_and_mul": Op(gelu_tanh_and_mul, supports_float),
    "swiglu_oai": Op(swiglu_oai, supports_float),
}


def _aot(form: str, width: int, dtype: torch.dtype) -> AotCase:
    block, rows_at_once = _blocks(width)
    constants = (width, block, rows_at_once, form, wide_type(dtype))
    return AotCase(
        f"{form}-{width}-{dtype}", _gate, (dtype, dtype), constants,
        lambda arch: tables.row_options("gate", tables.aot_facts(arch), block * rows_at_once),
    )  # fmt: skip


AOT = [_aot(form, 8192, torch.bfloat16) for form in ("silu", "gelu", "gelu_tanh", "swiglu_oai")] + [_aot("silu", 100, torch.float32)]

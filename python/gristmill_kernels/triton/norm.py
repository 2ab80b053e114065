"""Triton kernels of the norms: one pass over a row that is held in registers, several short rows per program."""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.triton import launch, tables
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, Rows, supports_float, wide_type


@triton.jit
def _rms_norm_kernel(
    out, x, weight,
    out_outer: tl.int64, out_inner: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    inner: tl.int32, count: tl.int32, eps: tl.float32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (cols < WIDTH)[None, :]
    outer_row, inner_row = (rows // inner).to(tl.int64), (rows % inner).to(tl.int64)
    values = tl.load(x + (outer_row * x_outer + inner_row * x_inner)[:, None] + cols[None, :], mask=mask, other=0.0).to(WIDE)
    factor = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(WIDE) + OFFSET
    mean = tl.sum(values * values, axis=1) / WIDTH
    result = values * (1.0 / tl.sqrt(mean + eps))[:, None] * factor[None, :]
    tl.store(out + (outer_row * out_outer + inner_row * out_inner)[:, None] + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


@triton.jit
def _fused_add_rms_norm_kernel(
    x, residual, weight,
    x_outer: tl.int64, x_inner: tl.int64, residual_outer: tl.int64, residual_inner: tl.int64,
    inner: tl.int32, count: tl.int32, eps: tl.float32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, OFFSET: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (cols < WIDTH)[None, :]
    outer_row, inner_row = (rows // inner).to(tl.int64), (rows % inner).to(tl.int64)
    x_at = x + (outer_row * x_outer + inner_row * x_inner)[:, None] + cols[None, :]
    residual_at = residual + (outer_row * residual_outer + inner_row * residual_inner)[:, None] + cols[None, :]
    total = tl.load(x_at, mask=mask, other=0.0).to(WIDE) + tl.load(residual_at, mask=mask, other=0.0).to(WIDE)
    # The sum is rounded before it is normalised: what the next layer adds to is what this layer normalised.
    rounded = total.to(residual.dtype.element_ty)
    tl.store(residual_at, rounded, mask=mask)
    values = rounded.to(WIDE)
    factor = tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(WIDE) + OFFSET
    mean = tl.sum(values * values, axis=1) / WIDTH
    result = values * (1.0 / tl.sqrt(mean + eps))[:, None] * factor[None, :]
    tl.store(x_at, result.to(x.dtype.element_ty), mask=mask)


@triton.jit
def _layer_norm_kernel(
    out, x, weight, bias,
    out_outer: tl.int64, out_inner: tl.int64, x_outer: tl.int64, x_inner: tl.int64,
    inner: tl.int32, count: tl.int32, eps: tl.float32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, ROWS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (cols < WIDTH)[None, :]
    outer_row, inner_row = (rows // inner).to(tl.int64), (rows % inner).to(tl.int64)
    values = tl.load(x + (outer_row * x_outer + inner_row * x_inner)[:, None] + cols[None, :], mask=mask, other=0.0).to(WIDE)
    mean = tl.sum(values, axis=1) / WIDTH
    centred = tl.where(mask, values - mean[:, None], 0.0)
    variance = tl.sum(centred * centred, axis=1) / WIDTH
    result = centred * (1.0 / tl.sqrt(variance + eps))[:, None]
    if weight is not None:
        result *= tl.load(weight + cols, mask=cols < WIDTH, other=0.0).to(WIDE)[None, :]
    if bias is not None:
        result += tl.load(bias + cols, mask=cols < WIDTH, other=0.0).to(WIDE)[None, :]
    tl.store(out + (outer_row * out_outer + inner_row * out_inner)[:, None] + cols[None, :], result.to(out.dtype.element_ty), mask=mask)


_rms_norm = Kernel(_rms_norm_kernel)
_fused_add_rms_norm = Kernel(_fused_add_rms_norm_kernel)
_layer_norm = Kernel(_layer_norm_kernel)


def _launch(kernel: Kernel, first: Tensor, second: Tensor, vectors: tuple[Tensor | None, ...], eps: float, *offset: float) -> None:
    def on_rows(rows: Rows, first: Tensor, second: Tensor) -> None:
        width = first.shape[-1]
        block, rows_at_once = tables.row_block(width)
        numbers = (*rows.strides[0], *rows.strides[1], rows.inner, rows.total, eps)
        options = tables.row_options("norm", launch.facts(first.device), block * rows_at_once)
        constants = (width, block, rows_at_once, *offset, wide_type(first.dtype))
        kernel((launch.cdiv(rows.total, rows_at_once), 1, 1), (first, second, *vectors, *numbers), constants, options)

    launch.over_rows(on_rows, first, second)


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    _launch(_rms_norm, out, x, (weight,), eps, 0.0)


def gemma_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    _launch(_rms_norm, out, x, (weight,), eps, 1.0)


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    _launch(_fused_add_rms_norm, x, residual, (weight,), eps, 0.0)


def gemma_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    _launch(_fused_add_rms_norm, x, residual, (weight,), eps, 1.0)


def layer_norm(out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    _launch(_layer_norm, out, x, (weight, bias), eps)


_FUNCTIONS: tuple[Callable[..., None], ...] = (rms_norm, gemma_rms_norm, fused_add_rms_norm, gemma_fused_add_rms_norm, layer_norm)
OPS = {function.__name__: Op(function, supports_float) for function in _FUNCTIONS}


def _aot(kernel: Kernel, width: int, dtype: torch.dtype, *offset: float) -> AotCase:
    block, rows_at_once = tables.row_block(width)
    constants = (width, block, rows_at_once, *offset, wide_type(dtype))
    return AotCase(
        f"{width}-{dtype}", kernel, (dtype,) * kernel.num_pointers, constants,
        lambda arch: tables.row_options("norm", tables.aot_facts(arch), block * rows_at_once),
    )  # fmt: skip


AOT = [
    _aot(_rms_norm, 4096, torch.bfloat16, 0.0),
    _aot(_rms_norm, 128, torch.float32, 0.0),
    _aot(_fused_add_rms_norm, 20480, torch.bfloat16, 0.0),
    _aot(_layer_norm, 20480, torch.bfloat16),
]

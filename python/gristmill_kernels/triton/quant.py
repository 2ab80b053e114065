"""Triton kernels that make 8-bit numbers of rows, as quant.py of the package defines them: a group is held in registers between its largest
magnitude and its codes, several short groups per program. 8-bit floats are made from bits, on every GPU alike."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from gristmill_kernels.checks import FLOAT8_DTYPES, FLOAT_DTYPES, name_of
from gristmill_kernels.schema import QuantKey
from gristmill_kernels.triton import launch, tables
from gristmill_kernels.triton.kvcache import stored_form
from gristmill_kernels.triton.launch import AotCase, Kernel, Op, next_power_of_2

_FORMS = {torch.float8_e4m3fn: "e4m3fn", torch.float8_e5m2: "e5m2", torch.float8_e4m3fnuz: "e4m3fnuz", torch.int8: "int8"}
_LARGEST = {"e4m3fn": 448.0, "e5m2": 57344.0, "e4m3fnuz": 240.0, "int8": 127.0}
# Elements of a row that one program divides by a given scale.
_GIVEN_ELEMENTS = 2048


@triton.jit
def _codes(values, scale, FORM: tl.constexpr):
    """The bytes of values / scale."""
    if FORM == "int8":
        quotient = tl.div_rn(values, scale)
        bounded = tl.where(quotient > 127.0, 127.0, tl.where(quotient < -127.0, -127.0, quotient))
        # The last bit of 1.5 * 2^23 is worth 1: the sum is rounded to nearest even, and its lowest byte is the number.
        sums = (bounded + 12582912.0).to(tl.uint32, bitcast=True)
        codes = tl.where(quotient == quotient, sums & 0xFF, 0).to(tl.uint8)
    else:
        codes = stored_form(values, scale, FORM)
    return codes


@triton.jit
def _quant_kernel(
    out, scales, x,
    out_step: tl.int64, x_step: tl.int64, scale_step: tl.int64, scale_group_step: tl.int64,
    groups: tl.int32, count: tl.int32,
    WIDTH: tl.constexpr, BLOCK: tl.constexpr, UNITS: tl.constexpr, LARGEST: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    units = tl.program_id(0) * UNITS + tl.arange(0, UNITS)
    cols = tl.arange(0, BLOCK)
    mask = (units < count)[:, None] & (cols < WIDTH)[None, :]
    row, group = (units // groups).to(tl.int64), (units % groups).to(tl.int64)
    values = tl.load(x + (row * x_step + group * WIDTH)[:, None] + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    magnitudes = tl.abs(values)
    amax = tl.max(tl.where(magnitudes <= 3.4028234663852886e38, magnitudes, 0.0), axis=1)
    scale = tl.div_rn(amax, tl.full(amax.shape, LARGEST, tl.float32))
    # 2^-126, and the largest that 127 can be multiplied by.
    scale = tl.where(scale < 1.1754943508222875e-38, 1.1754943508222875e-38, scale)
    scale = tl.where(scale > 2.679388389018751e36, 2.679388389018751e36, scale)
    tl.store(scales + row * scale_step + group * scale_group_step, scale, mask=units < count)
    codes = _codes(values, tl.broadcast_to(scale[:, None], values.shape), FORM)
    tl.store(out + (row * out_step + group * WIDTH)[:, None] + cols[None, :], codes, mask=mask)


@triton.jit
def _given_kernel(
    out, x, scale,
    out_step: tl.int64, x_step: tl.int64,
    count: tl.int32, width: tl.int32,
    BLOCK: tl.constexpr, ROWS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = (rows < count)[:, None] & (cols < width)[None, :]
    row = rows.to(tl.int64)[:, None]
    values = tl.load(x + row * x_step + cols[None, :], mask=mask, other=0.0).to(tl.float32)
    tl.store(out + row * out_step + cols[None, :], _codes(values, tl.full(values.shape, 1.0, tl.float32) * tl.load(scale), FORM), mask=mask)


_quant = Kernel(_quant_kernel)
_given = Kernel(_given_kernel)


def _groups_of(out: Tensor, scales: Tensor, x: Tensor, width: int) -> None:
    tokens, groups = scales.shape
    form = _FORMS[out.dtype]
    block, units = tables.row_block(max(1, width))
    numbers = (out.stride(0), x.stride(0), *scales.stride(), groups, tokens * groups)
    options = tables.row_options("quant", launch.facts(x.device), block * units)
    _quant(
        (launch.cdiv(tokens * groups, units), 1, 1), (out.view(torch.uint8), scales, x, *numbers),
        (width, block, units, _LARGEST[form], form), options,
    )  # fmt: skip


def per_token_quant_fp8(out: Tensor, scales: Tensor, x: Tensor) -> None:
    _groups_of(out, scales, x, x.shape[1])


def per_token_quant_int8(out: Tensor, scales: Tensor, x: Tensor) -> None:
    _groups_of(out, scales, x, x.shape[1])


def per_group_quant_fp8(out: Tensor, scales: Tensor, x: Tensor, group_size: int) -> None:
    _groups_of(out, scales, x, group_size)


def quant_fp8(out: Tensor, x: Tensor, scale: Tensor) -> None:
    tokens, width = x.shape
    block, rows = tables.row_block(min(max(1, width), _GIVEN_ELEMENTS))
    options = tables.row_options("quant", launch.facts(x.device), block * rows)
    grid = (launch.cdiv(tokens, rows), launch.cdiv(width, block), 1)
    _given(grid, (out.view(torch.uint8), x, scale, out.stride(0), x.stride(0), tokens, width), (block, rows, _FORMS[out.dtype]), options)


def _supports(key: QuantKey) -> str | None:
    if key.dtype not in FLOAT_DTYPES:
        return f"dtype {name_of(key.dtype)} is not float32, float16 or bfloat16"
    if key.out_dtype is not torch.int8 and key.out_dtype not in FLOAT8_DTYPES:
        return f"the codes are {name_of(key.out_dtype)}, neither int8 nor an 8-bit float"
    return None


_FUNCTIONS = (quant_fp8, per_token_quant_fp8, per_token_quant_int8, per_group_quant_fp8)
OPS = {function.__name__: Op(function, _supports) for function in _FUNCTIONS}


def _aot(width: int, dtype: torch.dtype, form: str) -> AotCase:
    block, units = tables.row_block(width)
    return AotCase(
        f"{width}-{dtype}-{form}", _quant, (torch.uint8, torch.float32, dtype), (width, block, units, _LARGEST[form], form),
        lambda arch: tables.row_options("quant", tables.aot_facts(arch), block * units),
    )  # fmt: skip


def _aot_given(width: int, dtype: torch.dtype, form: str) -> AotCase:
    block, rows = tables.row_block(min(next_power_of_2(width), _GIVEN_ELEMENTS))
    return AotCase(
        f"{width}-{dtype}-{form}", _given, (torch.uint8, dtype, torch.float32), (block, rows, form),
        lambda arch: tables.row_options("quant", tables.aot_facts(arch), block * rows),
    )  # fmt: skip


AOT = [
    _aot(4096, torch.bfloat16, "e4m3fn"),
    _aot(128, torch.bfloat16, "e4m3fnuz"),
    _aot(14336, torch.bfloat16, "int8"),
    _aot(128, torch.float32, "e5m2"),
    _aot_given(4096, torch.bfloat16, "e4m3fn"),
]

"""Activations as 8-bit numbers: by a given scale, or by a scale per token or per group of columns.

How a value is rounded. With `largest` 448, 57344, 240 (float8_e4m3fn, float8_e5m2, float8_e4m3fnuz) or 127 (int8), in float32 arithmetic:

    scale = max(amax / largest, 2^-126)        amax: the largest magnitude among the finite values of the group, 0 without any
    code  = value / scale, rounded to the nearest code, ties to even

so a scale is finite and not zero for any input, zeros and subnormal numbers included. What lies beyond the largest code, infinities
included, becomes that code with its sign; a NaN stays a NaN in 8-bit floats (0x80 in float8_e4m3fnuz, which has no negative zero either)
and is 0 in int8, which does not use -128. A scale of int8 is at most 2.6793885e36, so that 127 times it is finite. `code * scale` is what a
value has become. Every implementation gives the same bits, but for the sign and payload of a NaN; the division is a true one, not a
product with the inverse.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import (
    FLOAT8_DTYPES,
    check_float,
    is_dense,
    name_of,
    refuse_device,
    refuse_dtype,
    refuse_shape,
    refuse_stride,
    refuse_value,
    same_device,
)
from gristmill_kernels.schema import QUANT_GROUPS, quant_key

_FLOAT8_NAMES = "float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz"


def _check_rows(function: str, x: Tensor) -> torch.Size:
    check_float(function, "x", x)
    if x.dim() != 2:
        raise refuse_shape(function, "x", x, "[T, H]")
    return x.shape


def _codes(function: str, x: Tensor, dtype: torch.dtype | None, out: Tensor | None) -> Tensor:
    """`out`, or a new tensor of `dtype`."""
    if out is None:
        if dtype is not None and dtype not in FLOAT8_DTYPES:
            raise refuse_value(function, "dtype", name_of(dtype), _FLOAT8_NAMES)
        return torch.empty(x.shape, dtype=torch.float8_e4m3fn if dtype is None else dtype, device=x.device)
    if out.dtype not in FLOAT8_DTYPES:
        raise refuse_dtype(function, "out", out, _FLOAT8_NAMES)
    if dtype is not None and out.dtype is not dtype:
        raise refuse_dtype(function, "out", out, f"the given {name_of(dtype)}")
    _check_out(function, out, x)
    return out


def _check_out(function: str, out: Tensor, x: Tensor) -> None:
    if out.shape != x.shape:
        raise refuse_shape(function, "out", out, f"the shape of x = {tuple(x.shape)}")
    if not is_dense(out):
        raise refuse_stride(function, "out", out)
    if not same_device(out, x):
        raise refuse_device(function, "out", out, x)


def _scales(function: str, x: Tensor, groups: int, scales: Tensor | None, right: str) -> Tensor:
    """`scales`, or a new row-major tensor."""
    shape = (x.shape[0], groups)
    if scales is None:
        return torch.empty(shape, dtype=torch.float32, device=x.device)
    if scales.dtype is not torch.float32:
        raise refuse_dtype(function, "scales", scales, "float32")
    if scales.shape != shape:
        raise refuse_shape(function, "scales", scales, f"{right} = {shape}")
    if not same_device(scales, x):
        raise refuse_device(function, "scales", scales, x)
    return scales


def quant_fp8(x: Tensor, scale: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x / scale` as 8-bit floats, with one scale that is known beforehand (static quantisation).

    Args:
        x: [T, H] float32, float16 or bfloat16; any row stride.
        scale: one float32 on the device of x, such as a checkpoint's `input_scale`; positive and finite, which is not checked.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; that of `out`, or float8_e4m3fn, when None.
        out: [T, H], 8-bit float; any row stride. Allocated when None.

    Returns:
        `out`. How a value is rounded and what saturates stands at the top of this module.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source of the 8-bit formats: Micikevicius et al., "FP8 Formats for Deep Learning" (2022), table 1; fnuz: Noune et al. 2022.

    >>> import torch
    >>> quant_fp8(torch.tensor([[1.0, -3.0, 1000.0]]), torch.tensor(0.5)).float()
    tensor([[  2.,  -6., 448.]])
    """
    _check_rows("quant_fp8", x)
    if scale.dtype is not torch.float32:
        raise refuse_dtype("quant_fp8", "scale", scale, "float32")
    if scale.numel() != 1:
        raise refuse_shape("quant_fp8", "scale", scale, "of one element")
    if not same_device(scale, x):
        raise refuse_device("quant_fp8", "scale", scale, x)
    out = _codes("quant_fp8", x, dtype, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.quant_fp8(out, x, scale)
    else:
        select("quant_fp8", quant_key(x, out))(out, x, scale)
    return out


def per_token_quant_fp8(
    x: Tensor, dtype: torch.dtype | None = None, *, out: Tensor | None = None, scales: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Every row of x as 8-bit floats with a scale of its own: its largest finite magnitude becomes the largest code.

    Args:
        x: [T, H] float32, float16 or bfloat16; any row stride.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; that of `out`, or float8_e4m3fn, when None.
        out: [T, H], 8-bit float; any row stride. Allocated when None.
        scales: [T, 1] float32; any stride. Allocated when None.

    Returns:
        `out` and `scales`; `out.float() * scales` is close to x. The formulas stand at the top of this module.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    >>> import torch
    >>> codes, scales = per_token_quant_fp8(torch.tensor([[896.0, -2.0], [0.0, 0.0]]))
    >>> codes.float(), scales[0]
    (tensor([[448.,  -1.],
            [  0.,   0.]]), tensor([2.]))
    """
    _check_rows("per_token_quant_fp8", x)
    out = _codes("per_token_quant_fp8", x, dtype, out)
    scales = _scales("per_token_quant_fp8", x, 1, scales, "[T, 1]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.per_token_quant_fp8(out, scales, x)
    else:
        select("per_token_quant_fp8", quant_key(x, out))(out, scales, x)
    return out, scales


def per_token_quant_int8(x: Tensor, *, out: Tensor | None = None, scales: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Every row of x as symmetric 8-bit integers in [-127, 127] with a scale of its own.

    Args:
        x: [T, H] float32, float16 or bfloat16; any row stride.
        out: [T, H] int8; any row stride. Allocated when None.
        scales: [T, 1] float32; any stride. Allocated when None.

    Returns:
        `out` and `scales`; `out.float() * scales` is close to x. The formulas, and what becomes of infinities and NaN, stand at the top of
        this module.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    >>> import torch
    >>> per_token_quant_int8(torch.tensor([[254.0, -5.0, 3.0]]))
    (tensor([[127,  -2,   2]], dtype=torch.int8), tensor([[2.]]))
    """
    _check_rows("per_token_quant_int8", x)
    if out is None:
        out = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    elif out.dtype is not torch.int8:
        raise refuse_dtype("per_token_quant_int8", "out", out, "int8")
    else:
        _check_out("per_token_quant_int8", out, x)
    scales = _scales("per_token_quant_int8", x, 1, scales, "[T, 1]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.per_token_quant_int8(out, scales, x)
    else:
        select("per_token_quant_int8", quant_key(x, out))(out, scales, x)
    return out, scales


def _column_major(tokens: int, groups: int, x: Tensor) -> Tensor:
    """[tokens, groups] whose columns lie side by side and begin at multiples of 16 bytes."""
    return torch.empty((groups, -(-tokens // 4) * 4), dtype=torch.float32, device=x.device)[:, :tokens].T


def per_group_quant_fp8(
    x: Tensor,
    group_size: int = 128,
    dtype: torch.dtype | None = None,
    *,
    column_major_scales: bool = False,
    out: Tensor | None = None,
    scales: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Every `group_size` neighbours of a row as 8-bit floats with a scale of their own, as DeepSeek-V3's products by blocks take them.

    Args:
        x: [T, H] float32, float16 or bfloat16; any row stride. `group_size` divides H.
        group_size: 32, 64, 128 or 256 columns.
        dtype: float8_e4m3fn, float8_e5m2 or float8_e4m3fnuz; that of `out`, or float8_e4m3fn, when None.
        column_major_scales: whether allocated scales lie column by column, each column beginning at a multiple of 16 bytes: what a tensor
            memory accelerator reads (DeepGEMM's `get_col_major_tma_aligned_tensor`).
        out: [T, H], 8-bit float; any row stride. Allocated when None.
        scales: [T, H / group_size] float32; any strides, and so either order. Allocated when None.

    Returns:
        `out` and `scales`. The formulas stand at the top of this module.

    Raises:
        TypeError, ValueError: a dtype, shape, stride, device or group size that does not fit, in one sentence.

    Source: DeepSeek-AI, "DeepSeek-V3 Technical Report" (2024), section 3.3.2 (tiles of 1 x 128).

    >>> import torch
    >>> codes, scales = per_group_quant_fp8(torch.tensor([[448.0] * 32 + [896.0] * 32]), group_size=32)
    >>> scales
    tensor([[1., 2.]])
    """
    num_tokens, width = _check_rows("per_group_quant_fp8", x)
    if group_size not in QUANT_GROUPS:
        raise refuse_value("per_group_quant_fp8", "group_size", group_size, "32, 64, 128 or 256")
    if width % group_size:
        raise refuse_shape("per_group_quant_fp8", "x", x, f"[T, H] with H a multiple of group_size = {group_size}")
    groups = width // group_size
    out = _codes("per_group_quant_fp8", x, dtype, out)
    if column_major_scales and scales is None:
        scales = _column_major(num_tokens, groups, x)
    scales = _scales("per_group_quant_fp8", x, groups, scales, "[T, H / group_size]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.per_group_quant_fp8(out, scales, x, group_size)
    else:
        select("per_group_quant_fp8", quant_key(x, out))(out, scales, x, group_size)
    return out, scales

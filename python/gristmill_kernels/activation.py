"""Gated activations between the two matrix products of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_like, refuse_shape, refuse_value
from gristmill_kernels.schema import norm_key


def _checked_out(function: str, x: Tensor, out: Tensor | None) -> Tensor:
    """`out`, allocated when None, of half the width of x."""
    check_float(function, "x", x)
    *leading, width = x.shape
    if width % 2:
        raise refuse_shape(function, "x", x, "of even width [..., 2N]")
    shape = (*leading, width // 2)
    if out is None:
        return torch.empty(shape, dtype=x.dtype, device=x.device)
    check_like(function, "out", out, x, shape, "[..., N]")
    return out


def silu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`silu(gate) * up` where `gate` is the first and `up` the second half of the last dimension.

    Args:
        x: [..., 2N] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        out: [..., N], dtype of x. Allocated when None.

    Returns:
        `out`, computed in at least float32 and rounded once.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Shazeer, "GLU Variants Improve Transformer" (2020), SwiGLU.
    """
    out = _checked_out("silu_and_mul", x, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.silu_and_mul(out, x)
    else:
        select("silu_and_mul", norm_key(x))(out, x)
    return out


def gelu_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the exact GELU, `gelu(g) = g / 2 * (1 + erf(g / sqrt(2)))`; `gate` is the first and `up` the second half of
    the last dimension.

    Args:
        x: [..., 2N] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        out: [..., N], dtype of x. Allocated when None.

    Returns:
        `out`, computed in at least float32 and rounded once; the error is within 2 units in the last place plus 2^-22 |gate * up|.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Hendrycks and Gimpel, "Gaussian Error Linear Units" (2016), section 2; Shazeer 2020, GEGLU.
    """
    out = _checked_out("gelu_and_mul", x, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.gelu_and_mul(out, x)
    else:
        select("gelu_and_mul", norm_key(x))(out, x)
    return out


def gelu_tanh_and_mul(x: Tensor, *, out: Tensor | None = None) -> Tensor:
    """`gelu(gate) * up` with the tanh form, `gelu(g) = g / 2 * (1 + tanh(sqrt(2 / pi) * (g + 0.044715 g^3)))`; `gate` is the first and
    `up` the second half of the last dimension.

    Args:
        x: [..., 2N] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        out: [..., N], dtype of x. Allocated when None.

    Returns:
        `out`, computed in at least float32 and rounded once; the error is within 2 units in the last place plus 2^-22 |gate * up|.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Hendrycks and Gimpel 2016, section 2 (Gemma's activation).
    """
    out = _checked_out("gelu_tanh_and_mul", x, out)
    if torch.compiler.is_compiling():
        torch.ops.gristmill.gelu_tanh_and_mul(out, x)
    else:
        select("gelu_tanh_and_mul", norm_key(x))(out, x)
    return out


def swiglu_oai(x: Tensor, *, alpha: float = 1.702, limit: float = 7.0, out: Tensor | None = None) -> Tensor:
    """The clamped gate of gpt-oss: `g * sigmoid(alpha * g) * (u + 1)` with `g = min(gate, limit)` and `u = clamp(up, -limit, limit)`.

    Gate and up alternate: `gate = x[..., 0::2]`, `up = x[..., 1::2]`.

    Args:
        x: [..., 2N] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        alpha: steepness of the sigmoid, dimensionless.
        limit: largest gate and largest magnitude of up, in the units of x; `inf` for no limit. A NaN stays one.
        out: [..., N], dtype of x. Allocated when None.

    Returns:
        `out`, computed in at least float32 and rounded once; the error is within 2 units in the last place plus 2^-22 |g * (u + 1)|.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, or a negative limit, in one sentence.

    Source: the `swiglu` of OpenAI's gpt-oss reference model (2025).
    """
    out = _checked_out("swiglu_oai", x, out)
    if not limit >= 0:
        raise refuse_value("swiglu_oai", "limit", limit, "at least 0")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.swiglu_oai(out, x, alpha, limit)
    else:
        select("swiglu_oai", norm_key(x))(out, x, alpha, limit)
    return out

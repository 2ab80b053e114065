"""Gated activations between the two matrix products of an MLP."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_like, refuse_shape
from gristmill_kernels.schema import norm_key


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
    check_float("silu_and_mul", "x", x)
    *leading, width = x.shape
    if width % 2:
        raise refuse_shape("silu_and_mul", "x", x, "of even width [..., 2N]")
    shape = (*leading, width // 2)
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_like("silu_and_mul", "out", out, x, shape, "[..., N]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.silu_and_mul(out, x)
    else:
        select("silu_and_mul", norm_key(x))(out, x)
    return out

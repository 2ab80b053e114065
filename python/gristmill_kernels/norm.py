"""Normalisation: RMS norm, Gemma's variant of it, both fused with the residual addition, and layer norm."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels._registry import select
from gristmill_kernels.checks import check_float, check_like
from gristmill_kernels.schema import norm_key


def rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Root-mean-square normalisation over the last dimension: `x / sqrt(mean(x^2) + eps) * weight`.

    Args:
        x: [..., H] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        weight: [H], dtype of x.
        eps: added to the mean square, dimensionless.
        out: [..., H], dtype of x; may be x. Allocated when None.

    Returns:
        `out`. Sums are taken in at least float32 and the result is rounded once.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019), eq. 4.

    >>> import torch
    >>> rms_norm(torch.tensor([[3.0, 4.0]]), torch.ones(2), eps=0.0)
    tensor([[0.8485, 1.1314]])
    """
    check_float("rms_norm", "x", x)
    shape = x.shape
    check_like("rms_norm", "weight", weight, x, shape[-1:], "[H]")
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_like("rms_norm", "out", out, x, shape, "the shape of x")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.rms_norm(out, x, weight, eps)
    else:
        select("rms_norm", norm_key(x))(out, x, weight, eps)
    return out


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """In place: `residual += x`, then `x = rms_norm(residual, weight, eps)`.

    The sum is rounded to the dtype before it is normalised, so a model gives the same numbers with and without the fusion.

    Args:
        x: [..., H] float32, float16 or bfloat16; overwritten with the normalised sum.
        residual: [..., H], dtype of x; overwritten with the sum.
        weight: [H], dtype of x.
        eps: added to the mean square.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    check_float("fused_add_rms_norm", "x", x)
    check_like("fused_add_rms_norm", "residual", residual, x, x.shape, "the shape of x")
    check_like("fused_add_rms_norm", "weight", weight, x, x.shape[-1:], "[H]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.fused_add_rms_norm(x, residual, weight, eps)
    else:
        select("fused_add_rms_norm", norm_key(x))(x, residual, weight, eps)


def gemma_rms_norm(x: Tensor, weight: Tensor, eps: float = 1e-6, *, out: Tensor | None = None) -> Tensor:
    """Root-mean-square normalisation whose stored weight is the factor minus 1: `x / sqrt(mean(x^2) + eps) * (1 + weight)`.

    Args:
        x: [..., H] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        weight: [H], dtype of x; 1 is added before anything is rounded to that dtype.
        eps: added to the mean square, dimensionless.
        out: [..., H], dtype of x; may be x. Allocated when None.

    Returns:
        `out`. Sums are taken in at least float32 and the result is rounded once.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Zhang and Sennrich 2019, eq. 4, with the weight of Gemma (Gemma Team 2024; `GemmaRMSNorm` in transformers).
    """
    check_float("gemma_rms_norm", "x", x)
    shape = x.shape
    check_like("gemma_rms_norm", "weight", weight, x, shape[-1:], "[H]")
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_like("gemma_rms_norm", "out", out, x, shape, "the shape of x")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.gemma_rms_norm(out, x, weight, eps)
    else:
        select("gemma_rms_norm", norm_key(x))(out, x, weight, eps)
    return out


def gemma_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float = 1e-6) -> None:
    """In place: `residual += x`, rounded to the dtype, then `x = gemma_rms_norm(residual, weight, eps)`.

    Args:
        x: [..., H] float32, float16 or bfloat16; overwritten with the normalised sum.
        residual: [..., H], dtype of x; overwritten with the sum.
        weight: [H], dtype of x; the factor is 1 + weight.
        eps: added to the mean square.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.
    """
    check_float("gemma_fused_add_rms_norm", "x", x)
    check_like("gemma_fused_add_rms_norm", "residual", residual, x, x.shape, "the shape of x")
    check_like("gemma_fused_add_rms_norm", "weight", weight, x, x.shape[-1:], "[H]")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.gemma_fused_add_rms_norm(x, residual, weight, eps)
    else:
        select("gemma_fused_add_rms_norm", norm_key(x))(x, residual, weight, eps)


def layer_norm(
    x: Tensor, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5, *, out: Tensor | None = None
) -> Tensor:
    """Layer normalisation over the last dimension: `(x - mean(x)) / sqrt(var(x) + eps) * weight + bias`.

    Args:
        x: [..., H] float32, float16 or bfloat16; any leading strides, innermost stride 1.
        weight: [H], dtype of x; 1 when None.
        bias: [H], dtype of x; 0 when None.
        eps: added to the variance (of the population: divided by H), dimensionless.
        out: [..., H], dtype of x; may be x. Allocated when None.

    Returns:
        `out`. A large mean costs the variance no digits that float32 has; the result is rounded once.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    Source: Ba, Kiros and Hinton, "Layer Normalization" (2016), eq. 4.

    >>> import torch
    >>> layer_norm(torch.tensor([[1.0, 3.0]]), eps=0.0)
    tensor([[-1.,  1.]])
    """
    check_float("layer_norm", "x", x)
    shape = x.shape
    if weight is not None:
        check_like("layer_norm", "weight", weight, x, shape[-1:], "[H]")
    if bias is not None:
        check_like("layer_norm", "bias", bias, x, shape[-1:], "[H]")
    if out is None:
        out = torch.empty(shape, dtype=x.dtype, device=x.device)
    else:
        check_like("layer_norm", "out", out, x, shape, "the shape of x")
    if torch.compiler.is_compiling():
        torch.ops.gristmill.layer_norm(out, x, weight, bias, eps)
    else:
        select("layer_norm", norm_key(x))(out, x, weight, bias, eps)
    return out

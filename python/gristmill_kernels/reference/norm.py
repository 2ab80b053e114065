"""Root-mean-square normalisation (Zhang and Sennrich 2019, eq. 4) and layer normalisation (Ba et al. 2016) in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def _normalise(x: Tensor, factor: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * factor


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(_normalise(x, weight.double(), eps))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    # The sum is rounded to the dtype before it is normalised: what the next layer adds to is what this layer normalised.
    residual.copy_(x.double() + residual.double())
    x.copy_(_normalise(residual, weight.double(), eps))


def gemma_rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(_normalise(x, 1 + weight.double(), eps))


def gemma_fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    residual.copy_(x.double() + residual.double())
    x.copy_(_normalise(residual, 1 + weight.double(), eps))


def layer_norm(out: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> None:
    wide = x.double()
    centred = wide - wide.mean(-1, keepdim=True)
    result = centred * (centred.square().mean(-1, keepdim=True) + eps).rsqrt()
    if weight is not None:
        result = result * weight.double()
    out.copy_(result if bias is None else result + bias.double())

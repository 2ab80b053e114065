"""Root-mean-square normalisation (Zhang and Sennrich 2019, eq. 4) in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def _normalise(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.double()
    return wide * (wide.square().mean(-1, keepdim=True) + eps).rsqrt() * weight.double()


def rms_norm(out: Tensor, x: Tensor, weight: Tensor, eps: float) -> None:
    out.copy_(_normalise(x, weight, eps))


def fused_add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> None:
    # The sum is rounded to the dtype before it is normalised: what the next layer adds to is what this layer normalised.
    residual.copy_(x.double() + residual.double())
    x.copy_(_normalise(residual, weight, eps))

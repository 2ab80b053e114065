"""Gated activations (Shazeer 2020, "GLU variants") in plain PyTorch."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)


def gelu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    # 1 + erf(y) as erfc(-y), which keeps its digits where the sum has none.
    out.copy_(gate * 0.5 * torch.special.erfc(gate * -(0.5**0.5)) * up)


def gelu_tanh_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    out.copy_(gelu(gate, approximate="tanh") * up)


def swiglu_oai(out: Tensor, x: Tensor, alpha: float, limit: float) -> None:
    wide = x.double()
    gate, up = wide[..., 0::2].clamp(max=limit), wide[..., 1::2].clamp(-limit, limit)
    out.copy_(gate * (alpha * gate).sigmoid() * (up + 1))

"""Gated activations (Shazeer 2020, "GLU variants") in plain PyTorch."""

from __future__ import annotations

from torch import Tensor


def silu_and_mul(out: Tensor, x: Tensor) -> None:
    gate, up = x.double().chunk(2, dim=-1)
    out.copy_(gate * gate.sigmoid() * up)

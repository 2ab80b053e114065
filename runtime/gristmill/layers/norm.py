"""RMS norm, alone or fused with the residual addition before it."""

from __future__ import annotations

import torch
from torch import nn

from gristmill.layers.ops import LayerOps
from gristmill.layers.targets import Target, Targets


class RMSNorm(nn.Module):
    """x / rms(x) * weight over the last dimension, accumulated in float32."""

    def __init__(self, width: int, eps: float, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__()
        self.weight = torch.ones(width, dtype=dtype, device=ops.device)
        self.eps = eps
        self._norm, self._fused = ops.rms_norm, ops.fused_add_rms_norm

    def targets(self, name: str) -> Targets:
        return {f"{name}.weight": Target(tuple(self.weight.shape), self.weight.copy_)}

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._norm(out, x, self.weight, self.eps)

    def add_and_norm(self, x: torch.Tensor, residual: torch.Tensor) -> None:
        """residual += x; x = norm(residual)."""
        self._fused(x, residual, self.weight, self.eps)

"""Attention through gristmill_kernels' CPU ops; the default on the CPU."""

from __future__ import annotations

import torch

from gristmill.attention.kernels import KernelBackend
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig


@register("cpu")
class CpuBackend(KernelBackend):
    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        if device != "cpu":
            return f"it runs on the CPU, not on {device}"
        if config.head_dim % 8 or config.head_dim > 576:
            return f"head_dim {config.head_dim} is not a multiple of 8 up to 576"
        return None

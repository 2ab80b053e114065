"""Attention through the best of gristmill_kernels on an NVIDIA GPU, op by op: C++ where it takes the model's shapes, Triton elsewhere."""

from __future__ import annotations

import torch

from gristmill.attention.kernels import KernelBackend
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill_kernels import attention as _kernels  # noqa: F401 (registers the implementations)
from gristmill_kernels import dispatch


@register("cuda")
class CudaBackend(KernelBackend):
    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        if device != "cuda":
            return f"it runs on NVIDIA GPUs, not on {device}"
        key = (device, dtype, dtype, config.head_dim, config.head_dim, config.num_heads, config.num_kv_heads)
        for name in ("decode_attention", "extend_attention"):
            choice = dispatch.explain(name, key)
            if choice.family == "reference":
                return f"no kernel takes {name}: {'; '.join(choice.declined)}"
        return None

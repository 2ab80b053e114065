"""Attention through gristmill_kernels' Triton kernels, for NVIDIA and AMD GPUs; on the CPU only under Triton's interpreter, as a proof."""

from __future__ import annotations

import torch

from gristmill.attention.kernels import KernelBackend
from gristmill.attention.registry import register
from gristmill.loading.config import ModelConfig
from gristmill_kernels import attention as _kernels  # noqa: F401 (registers the implementations)
from gristmill_kernels import dispatch
from gristmill_kernels import triton as triton_family


@register("triton")
class TritonBackend(KernelBackend):
    family = "triton"

    @classmethod
    def supports(cls, config: ModelConfig, device: str, dtype: torch.dtype) -> str | None:
        if (missing := triton_family.missing()) is not None:
            return missing
        if device == "cpu" and not triton_family.interpreted():
            return "Triton's kernels run on the CPU only under TRITON_INTERPRET=1"
        key = (device, dtype, dtype, config.head_dim, config.head_dim, config.num_heads, config.num_kv_heads)
        for name in ("decode_attention", "extend_attention"):
            if (reason := dispatch.why_not(name, cls.family, key)) is not None:
                return reason
        return None

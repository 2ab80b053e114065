"""Qwen3 (dense): Llama with an RMS norm over each head of q and k before the rotary embedding, and a head size of its own."""

from __future__ import annotations

import torch

from gristmill.layers.norm import RMSNorm
from gristmill.layers.ops import LayerOps
from gristmill.layers.targets import Targets
from gristmill.loading.config import ModelConfig
from gristmill.models.llama import LlamaAttention, LlamaForCausalLM, LlamaLayer


class Qwen3Attention(LlamaAttention):
    """Adds the per-head norms of q and k."""

    def __init__(self, config: ModelConfig, index: int, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__(config, index, ops, dtype)
        self.q_norm = RMSNorm(config.head_dim, config.rms_eps, ops, dtype)
        self.k_norm = RMSNorm(config.head_dim, config.rms_eps, ops, dtype)
        self._q_norm, self._k_norm = self.q_norm.forward, self.k_norm.forward

    def targets(self, prefix: str) -> Targets:
        return super().targets(prefix) | self.q_norm.targets(f"{prefix}.q_norm") | self.k_norm.targets(f"{prefix}.k_norm")

    def normalise(self, q: torch.Tensor, k: torch.Tensor) -> None:
        self._q_norm(q, q)
        self._k_norm(k, k)


class Qwen3Layer(LlamaLayer):
    attention_class = Qwen3Attention


class Qwen3ForCausalLM(LlamaForCausalLM):
    layer_class = Qwen3Layer

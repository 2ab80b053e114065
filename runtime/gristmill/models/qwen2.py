"""Qwen2 (and Qwen2.5): Llama with biases on q, k and v, and optionally sliding-window attention in the upper layers."""

from __future__ import annotations

from gristmill.models.llama import LlamaForCausalLM


class Qwen2ForCausalLM(LlamaForCausalLM):
    """Everything that differs from Llama is in ModelConfig: attention_bias, attention_out_bias, sliding_window."""

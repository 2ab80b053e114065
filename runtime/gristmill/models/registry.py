"""Which class builds which architecture."""

from __future__ import annotations

import importlib

import torch

from gristmill.layers.ops import LayerOps
from gristmill.loading.config import ModelConfig, architecture_error
from gristmill.models.llama import LlamaForCausalLM

_CLASSES = {
    "llama": "gristmill.models.llama:LlamaForCausalLM",
    "qwen2": "gristmill.models.qwen2:Qwen2ForCausalLM",
    "qwen3": "gristmill.models.qwen3:Qwen3ForCausalLM",
}


def build_model(config: ModelConfig, ops: LayerOps, dtype: torch.dtype, max_context: int) -> LlamaForCausalLM:
    """The model of `config`, without weights (see gristmill.loading.weights). Raises ModelError for an unknown architecture."""
    if config.architecture not in _CLASSES:
        raise architecture_error(config.architecture, "this")
    module, _, name = _CLASSES[config.architecture].partition(":")
    return getattr(importlib.import_module(module), name)(config, ops, dtype, max_context)

"""Random weights for a model of which only the configuration is at hand: its shapes, speed and memory, without its knowledge."""

from __future__ import annotations

from typing import Any

import torch

_STD = 0.02  # what transformers initialises linear layers with
_SEED = 0


def load_dummy_weights(model: Any) -> None:
    """Fill `model` (see gristmill.models) with normal random weights, made on its device; norms keep their ones, biases their zeros."""
    generator = torch.Generator(model.ops.device).manual_seed(_SEED)
    for name, target in model.targets().items():
        if len(target.shape) > 1:
            target.take(torch.empty(target.shape, dtype=model.dtype, device=model.ops.device).normal_(0, _STD, generator=generator))
        elif name == "rope_freqs.weight":
            target.take(torch.ones(target.shape))

"""Token embedding and the output head, shared or separate (CASES: tied embeddings come in several spellings)."""

from __future__ import annotations

import torch
from torch import nn

from gristmill.layers.ops import LayerOps
from gristmill.layers.targets import Target, Targets


class Embedding(nn.Module):
    """Row look-up in a table [vocab, hidden]."""

    def __init__(self, vocab_size: int, hidden_size: int, ops: LayerOps, dtype: torch.dtype) -> None:
        super().__init__()
        self.shape = (vocab_size, hidden_size)
        self.device, self.dtype = ops.device, dtype
        self.weight = torch.empty(0)

    def targets(self, name: str) -> Targets:
        return {f"{name}.weight": Target(self.shape, self._take)}

    def _take(self, tensor: torch.Tensor) -> None:
        self.weight = tensor.to(device=self.device, dtype=self.dtype, copy=True)

    def forward(self, ids: torch.Tensor, out: torch.Tensor) -> None:
        torch.index_select(self.weight, 0, ids, out=out)

"""Linear layers whose weight is one or several checkpoint matrices stacked, packed for the gemm as soon as the last part arrives."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import torch
from torch import nn

from gristmill.layers.ops import LayerOps
from gristmill.layers.targets import Target, Targets


class Linear(nn.Module):
    """y[M, n] = x[M, k] @ weight[n, k].T + bias, where weight is the checkpoint's `names` stacked along n.

    Weights are plain attributes, not parameters: they exist only packed, and attribute look-ups on the decode path stay cheap.
    """

    def __init__(self, k: int, parts: Sequence[int], ops: LayerOps, dtype: torch.dtype, *, bias: bool = False) -> None:
        super().__init__()
        self.k, self.n, self.parts, self.ops, self.dtype = k, sum(parts), tuple(parts), ops, dtype
        self.packed: torch.Tensor | None = None
        self.bias: torch.Tensor | None = torch.zeros(self.n, dtype=dtype, device=ops.device) if bias else None
        self._stack: torch.Tensor | None = None
        self._missing = set(range(len(parts)))
        self._run = ops.linear

    def targets(self, names: Sequence[str]) -> Targets:
        """Where the checkpoint tensors `<name>.weight` (and `<name>.bias`) of the parts go."""
        found: Targets = {}
        for index, (name, size) in enumerate(zip(names, self.parts, strict=True)):
            found[f"{name}.weight"] = Target((size, self.k), functools.partial(self._take, index))
            if self.bias is not None:
                rows = self.bias[sum(self.parts[:index]) : sum(self.parts[: index + 1])]
                found[f"{name}.bias"] = Target((size,), rows.copy_)
        return found

    def _take(self, index: int, tensor: torch.Tensor) -> None:
        if len(self.parts) == 1:
            self.set_weight(tensor.to(device=self.ops.device, dtype=self.dtype, copy=True))
            return
        if self._stack is None:
            self._stack = torch.empty(self.n, self.k, dtype=self.dtype, device=self.ops.device)
        start = sum(self.parts[:index])
        self._stack[start : start + self.parts[index]] = tensor
        self._missing.discard(index)
        if not self._missing:
            self.set_weight(self._stack)
            self._stack = None

    def set_weight(self, weight: torch.Tensor) -> None:
        """Pack `weight` [n, k] of the layer's dtype; the layer keeps only the packed form."""
        self.packed = self.ops.pack(weight)

    def forward(self, x: torch.Tensor, out: torch.Tensor) -> None:
        self._run(out, x, self.packed, self.bias, self.n, self.k)

"""The ops that layers are made of, in two interchangeable sets of the same signatures: our kernels, or plain PyTorch.

Every op writes into tensors it is given, like the ops of gristmill_kernels. A set is made once per model; each attribute of a KernelOps
is a resolved OpOverload, so that a call costs one dispatch.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any

import torch

from gristmill.loading.config import ModelConfig

Op = Callable[..., Any]

# Up to so many rows a GPU streams a weight faster through skinny_linear than through the library (docs/performance.md).
SKINNY_ROWS = 8


class LayerOps(ABC):
    """Interface of a set. `pack` turns a weight [n, k] into what `linear` takes; `family` says per op what runs, for capabilities."""

    name: str
    device: str  # where weights and buffers lie
    rms_norm: Op  # (out, x, weight, eps)
    fused_add_rms_norm: Op  # (x, residual, weight, eps): residual += x; x = norm(residual) * weight
    apply_rope: Op  # (q, k, positions, cos_sin_cache, is_neox), in place
    silu_and_mul: Op  # (out, x)
    linear: Op  # (out, x, packed, bias, n, k)
    families: dict[str, str]

    @abstractmethod
    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        """The form of a weight [n, k] that `linear` takes."""


class KernelOps(LayerOps):
    """The ops of gristmill_kernels, resolved for one model's dtype, device and head size."""

    name = "kernels"

    def __init__(self, config: ModelConfig, dtype: torch.dtype, device: str) -> None:
        from gristmill_kernels import dispatch, gemm  # gemm: importing a public module registers the implementations

        self.device = device
        plain = (device, dtype)
        keys: dict[str, tuple[Any, ...]] = {
            "rms_norm": plain,
            "fused_add_rms_norm": plain,
            "apply_rope": (*plain, config.head_dim, config.head_dim),
            "silu_and_mul": plain,
            "packed_linear" if device == "cpu" else "skinny_linear": plain,
        }
        self.families = {name: dispatch.chosen_family(name, key) for name, key in keys.items()}
        self._pack = gemm.pack_linear
        self.rms_norm, self.fused_add_rms_norm, self.apply_rope, self.silu_and_mul, linear = (
            dispatch.select(name, key) for name, key in keys.items()
        )
        self.linear = linear if device == "cpu" else self._plain_linear
        self._skinny = linear
        # a family of plain PyTorch is no better than the library's product
        self._skinny_rows = SKINNY_ROWS if self.families.get("skinny_linear") == "native" else 0

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        if self.device != "cpu":
            return weight
        packed: torch.Tensor = self._pack(weight).data
        return packed

    def _plain_linear(self, out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, n: int, k: int) -> None:
        """A GPU's linear layer: a few rows stream the weight through our kernel, more go through the vendor's library."""
        if x.shape[0] <= self._skinny_rows:
            self._skinny(out, x, weight, bias)
        else:
            _library_linear(out, x, weight, bias)


def _library_linear(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    if bias is None:
        torch.mm(x, weight.t(), out=out)
    else:
        torch.addmm(bias, x, weight.t(), out=out)


class TorchOps(LayerOps):
    """The same ops in plain PyTorch, independent of gristmill_kernels."""

    name = "torch"

    def __init__(self, device: str = "cpu") -> None:
        self.device = device

    families = dict.fromkeys(("rms_norm", "fused_add_rms_norm", "apply_rope", "silu_and_mul", "packed_linear"), "torch")

    def pack(self, weight: torch.Tensor) -> torch.Tensor:
        return weight

    @staticmethod
    def rms_norm(out: torch.Tensor, x: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        wide = x.float()
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
        torch.mul((wide * scale).to(x.dtype), weight, out=out)

    @staticmethod
    def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> None:
        residual += x
        TorchOps.rms_norm(x, residual, weight, eps)

    @staticmethod
    def apply_rope(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos_sin_cache: torch.Tensor, is_neox: bool) -> None:
        half = cos_sin_cache.shape[-1] // 2
        rows = cos_sin_cache.index_select(0, positions)
        cos, sin = rows[:, None, :half], rows[:, None, half:]
        for x in (q, k):
            if is_neox:
                first, second = x[..., :half], x[..., half : 2 * half]
            else:
                first, second = x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]
            a, b = first.float(), second.float()
            rotated = a * cos - b * sin, b * cos + a * sin
            first.copy_(rotated[0])
            second.copy_(rotated[1])

    @staticmethod
    def silu_and_mul(out: torch.Tensor, x: torch.Tensor) -> None:
        half = x.shape[-1] // 2
        torch.mul(torch.nn.functional.silu(x[..., :half]), x[..., half:], out=out)

    @staticmethod
    def linear(out: torch.Tensor, x: torch.Tensor, packed: torch.Tensor, bias: torch.Tensor | None, n: int, k: int) -> None:
        _library_linear(out, x, packed, bias)

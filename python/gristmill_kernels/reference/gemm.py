"""Linear layers in plain PyTorch; the packed form of a weight is the row-major weight itself."""

from __future__ import annotations

from torch import Tensor


def packed_weight_numel(n: int, k: int) -> int:
    """Elements of the packed form of a [n, k] weight."""
    return n * k


def pack_weight(out: Tensor, weight: Tensor) -> None:
    out.view(weight.shape).copy_(weight)


def packed_linear(out: Tensor, x: Tensor, packed: Tensor, bias: Tensor | None, n: int, k: int) -> None:
    result = x.double() @ packed.view(n, k).double().T
    out.copy_(result if bias is None else result + bias.double())


def skinny_linear(out: Tensor, x: Tensor, weight: Tensor, bias: Tensor | None) -> None:
    result = x.double() @ weight.double().T
    out.copy_(result if bias is None else result + bias.double())

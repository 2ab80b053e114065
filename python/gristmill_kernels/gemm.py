"""Linear layers over weights packed once at load time, and `skinny_linear` over a plain weight. A row's result never depends on the rows
beside it: every output is summed in a fixed order."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from gristmill_kernels import _registry, dispatch
from gristmill_kernels.checks import check_float, check_like, check_vector, refuse_shape
from gristmill_kernels.schema import SKINNY_ROWS, norm_key


@dataclass(frozen=True)
class PackedLinear:
    """A weight [n, k] in the private layout of the implementation family that packed it; only that family's kernel may read `data`."""

    data: Tensor
    n: int
    k: int
    dtype: torch.dtype
    family: str
    op: Any

    def __repr__(self) -> str:
        return f"PackedLinear(n={self.n}, k={self.k}, dtype={self.dtype}, family={self.family!r})"


def packed_weight_size(n: int, k: int, dtype: torch.dtype, device: str = "cpu") -> int:
    """Elements (of `dtype`) of the packed form of a weight [n, k] in the implementation that `pack_linear` would choose."""
    return _registry.packed_weight_numel(dispatch.chosen_family("packed_linear", (device, dtype)), n, k, dtype)


def pack_linear(weight: Tensor) -> PackedLinear:
    """Rearrange a weight for `linear`, once, when the model is loaded.

    Args:
        weight: [N, K] float32 or bfloat16 (float16 where an implementation has it), innermost stride 1.

    Returns:
        The packed weight; `weight` itself is no longer needed.

    Raises:
        TypeError, ValueError: a dtype, shape or stride that does not fit, in one sentence.
    """
    check_float("pack_linear", "weight", weight)
    if weight.dim() != 2:
        raise refuse_shape("pack_linear", "weight", weight, "[N, K]")
    n, k = weight.shape
    family = dispatch.chosen_family("packed_linear", norm_key(weight))
    data = torch.empty(_registry.packed_weight_numel(family, n, k, weight.dtype), dtype=weight.dtype, device=weight.device)
    dispatch.overload("pack_weight", family)(data, weight)
    return PackedLinear(data, n, k, weight.dtype, family, dispatch.overload("packed_linear", family))


def linear(x: Tensor, packed: PackedLinear, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` with float32 accumulation, rounded once.

    Args:
        x: [M, K], dtype of the packed weight; any row stride.
        packed: what `pack_linear` made of a weight [N, K].
        bias: [N], dtype of x, or None.
        out: [M, N], dtype of x; any row stride. Allocated when None.

    Returns:
        `out`. Row m is the same bit for bit whatever M is.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    >>> import torch
    >>> linear(torch.ones(1, 3), pack_linear(torch.arange(6.0).view(2, 3)))
    tensor([[ 3., 12.]])
    """
    n, k = packed.n, packed.k
    shape = x.shape
    if len(shape) != 2 or shape[1] != k:
        raise refuse_shape("linear", "x", x, f"[M, {k}]")
    check_like("linear", "x", x, packed.data, shape, "[M, K]")
    if out is None:
        out = torch.empty((shape[0], n), dtype=x.dtype, device=x.device)
    else:
        check_like("linear", "out", out, x, (shape[0], n), "[M, N]")
    if bias is not None:
        check_vector("linear", "bias", bias, x.dtype, n, x, "[N]")
    packed.op(out, x, packed.data, bias, n, k)
    return out


def skinny_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, out: Tensor | None = None) -> Tensor:
    """`x @ weight.T + bias` for at most 16 rows, as in decoding, with float32 accumulation, rounded once.

    On a GPU reading the weight is what takes time, so the kernel streams it: each byte once, many loads in flight, K split over the warps
    of a thread block. Fastest when rows begin at multiples of 16 bytes; any stride is right. 16-bit types multiply on the tensor cores.

    Args:
        x: [M, K] with M <= 16, float32, float16 or bfloat16; any row stride.
        weight: [N, K], dtype of x, as it is stored; any row stride.
        bias: [N], dtype of x, or None.
        out: [M, N], dtype of x; any row stride. Allocated when None.

    Returns:
        `out`. Row m is the same bit for bit whatever M is.

    Raises:
        TypeError, ValueError: a dtype, shape, stride or device that does not fit, in one sentence.

    >>> import torch
    >>> skinny_linear(torch.ones(1, 3), torch.arange(6.0).view(2, 3), bias=torch.tensor([0.5, 0.0]))
    tensor([[ 3.5000, 12.0000]])
    """
    check_float("skinny_linear", "x", x)
    if x.dim() != 2 or x.shape[0] > SKINNY_ROWS:
        raise refuse_shape("skinny_linear", "x", x, f"[M, K] with M <= {SKINNY_ROWS}")
    if weight.dim() != 2:
        raise refuse_shape("skinny_linear", "weight", weight, f"[N, {x.shape[1]}]")
    m, n = x.shape[0], weight.shape[0]
    check_like("skinny_linear", "weight", weight, x, (n, x.shape[1]), "[N, K]")
    if out is None:
        out = torch.empty((m, n), dtype=x.dtype, device=x.device)
    else:
        check_like("skinny_linear", "out", out, x, (m, n), "[M, N]")
    if bias is not None:
        check_vector("skinny_linear", "bias", bias, x.dtype, n, x, "[N]")
    dispatch.select("skinny_linear", norm_key(x))(out, x, weight, bias)
    return out

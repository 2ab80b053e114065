"""Rows as 8-bit numbers in plain PyTorch, in float32 arithmetic as the ops define it (quant.py)."""

from __future__ import annotations

import torch
from torch import Tensor

from gristmill_kernels.reference.kvcache import _LARGEST as LARGEST_FLOAT8

LEAST_SCALE = 2.0**-126
INT8_LARGEST = 127.0
INT8_LARGEST_SCALE = (1 + 0x010203 * 2.0**-23) * 2.0**121  # the largest float32 that 127 can be multiplied by


def _to_float8(quotients: Tensor, dtype: torch.dtype) -> Tensor:
    """Bounded first, since torch's own conversions overflow to infinity or NaN."""
    return quotients.clamp(-LARGEST_FLOAT8[dtype], LARGEST_FLOAT8[dtype]).to(dtype)  # a NaN stays one


def _scales(groups: Tensor, largest: float) -> Tensor:
    """One per group of the last dimension, which is kept."""
    magnitudes = torch.where(groups.isfinite(), groups, 0).abs()
    amax = magnitudes.amax(-1, keepdim=True) if groups.shape[-1] else magnitudes.new_zeros(*groups.shape[:-1], 1)
    # By a tensor: a GPU multiplies with the inverse of a number, which rounds otherwise.
    return (amax / torch.full_like(amax, largest)).clamp(min=LEAST_SCALE)


def quant_fp8(out: Tensor, x: Tensor, scale: Tensor) -> None:
    out.copy_(_to_float8(x.float() / scale.reshape(1, 1), out.dtype))


def per_token_quant_fp8(out: Tensor, scales: Tensor, x: Tensor) -> None:
    own = _scales(x.float(), LARGEST_FLOAT8[out.dtype])
    scales.copy_(own)
    out.copy_(_to_float8(x.float() / own, out.dtype))


def per_token_quant_int8(out: Tensor, scales: Tensor, x: Tensor) -> None:
    own = _scales(x.float(), INT8_LARGEST).clamp(max=INT8_LARGEST_SCALE)
    scales.copy_(own)
    out.copy_((x.float() / own).nan_to_num(nan=0.0).round().clamp(-INT8_LARGEST, INT8_LARGEST))


def per_group_quant_fp8(out: Tensor, scales: Tensor, x: Tensor, group_size: int) -> None:
    groups = x.float().unflatten(1, (x.shape[1] // group_size, group_size))
    own = _scales(groups, LARGEST_FLOAT8[out.dtype])
    scales.copy_(own.squeeze(-1))
    out.copy_(_to_float8(groups / own, out.dtype).flatten(1))

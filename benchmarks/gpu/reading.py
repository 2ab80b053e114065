"""A kernel that does nothing but read: what memory gives to one launch over so many bytes."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 4096  # numbers of 4 bytes: four loads of 16 bytes for each of 256 threads


@triton.jit
def _read_kernel(x, out, count, BLOCK: tl.constexpr):
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + tl.program_id(0), tl.sum(tl.load(x + offsets, mask=offsets < count, other=0)))


def read(x: Tensor, out: Tensor) -> None:
    """Reads all of x, contiguous, into sums of its bits: one int32 of `out` for every block."""
    words = x.view(-1).view(torch.int32)
    _read_kernel[(triton.cdiv(words.numel(), BLOCK),)](words, out, words.numel(), BLOCK=BLOCK, num_warps=8)


def sums_for(x: Tensor) -> Tensor:
    return torch.empty(triton.cdiv(x.numel() * x.element_size() // 4, BLOCK), dtype=torch.int32, device=x.device)

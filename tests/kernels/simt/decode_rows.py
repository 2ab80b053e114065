"""A row of the emulated decode_attention is the same bits beside other rows, whichever kernel merges its pieces:
`python -m tests.kernels.simt.decode_rows LIBRARY SEED`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

from gristmill_kernels import decode_attention, dispatch
from tests.kernels.simt.suite import hide_cpu_library, open_emulated

HEADS, KV_HEADS, DIM = 4, 2, 64
LENGTHS = (17_000, 3, 1200)  # 34 pieces alone go to the wide merge, beside short lists to the narrow one


def check(seed: int) -> None:
    source = torch.Generator().manual_seed(seed)
    total = sum(LENGTHS)
    q, k, v = (torch.randn(*shape, DIM, generator=source).bfloat16() for shape in ((3, HEADS), (total, KV_HEADS), (total, KV_HEADS)))
    slots = torch.randperm(total, generator=source).int()
    bounds = torch.tensor([0, *LENGTHS]).cumsum(0).int()
    lse = torch.empty(3, HEADS)
    together = decode_attention(q, k, v, bounds, slots, lse=lse)
    for row, length in enumerate(LENGTHS):
        begin, lse_alone = int(bounds[row]), torch.empty(1, HEADS)
        indptr = torch.tensor([0, length], dtype=torch.int32)
        alone = decode_attention(q[row : row + 1], k, v, indptr, slots[begin : begin + length], lse=lse_alone)
        assert torch.equal(alone[0], together[row]) and torch.equal(lse_alone[0], lse[row]), f"row {row} of {length} entries differs"


if __name__ == "__main__":
    hide_cpu_library()
    open_emulated(Path(sys.argv[1]))
    with dispatch.using("native"):
        check(int(sys.argv[2]))

"""The emulated index ops on tensors that hold nonsense, and on a request table whose rows lie further apart than int32 reaches:
`python -m tests.kernels.simt.hostile_indices LIBRARY SEED [ROUNDS]`."""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import gristmill_kernels as gk
from gristmill_kernels import dispatch
from tests.kernels import hostile_indices
from tests.kernels.simt.suite import hide_cpu_library, open_emulated


def i32(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def check_far_rows() -> None:
    """Three rows, the last of which begins beyond element 2^31: address space, not memory."""
    stride = 2**30 + 32
    table = torch.empty(2 * stride + 40, dtype=torch.int32).as_strided((3, 40), (stride, 1)).fill_(-9)
    slots = torch.arange(33, dtype=torch.int32)
    gk.write_req_to_token(table, i32(2, 0), i32(5, 0), i32(30, 3), slots)
    expected = torch.full((3, 40), -9, dtype=torch.int32)
    expected[2, 5:35], expected[0, :3] = slots[:30], slots[30:]
    assert torch.equal(table, expected)
    rows, lens = i32(2, 0), i32(35, 3)
    assert torch.equal(gk.kv_indices(table, rows, lens, kv_start=i32(5, 0))[1], slots)
    assert torch.equal(gk.page_table(table, rows[:1], lens[:1], 5), torch.tensor([[-1, 0, 1, 2, 3, 4, 5]], dtype=torch.int32))
    drafted = gk.draft_kv_indices(table, rows[:1], i32(34), 2, 1)[1]
    assert torch.equal(drafted[1], expected[2, :36]) and torch.equal(drafted[0, :35], expected[2, :35])


if __name__ == "__main__":
    hide_cpu_library()
    open_emulated(Path(sys.argv[1]))
    seed, rounds = int(sys.argv[2]), int(sys.argv[3]) if len(sys.argv) > 3 else 30
    assert hostile_indices.check(lambda name, _: dispatch.overload(name, "native"), seed, rounds)
    with dispatch.using("native"):
        check_far_rows()

"""Candidates and problems of the kernels that work row by row: how many warps share a program of the norms, the gates and the KV store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from benchmarks.tuning import Candidate, Table
from gristmill_kernels.triton import activation, kvcache, norm
from gristmill_kernels.triton import tables as option_tables
from gristmill_kernels.triton.launch import Kernel, Options

BF16 = torch.bfloat16
HEADS, DIM = 8, 128
# A decode step and a chunk of prefill.
ROWS = (64, 8192)

Make = Callable[[int, str], tuple]


def _norm_inputs(width: int, rows: int, device: str) -> tuple:
    out, x = (torch.randn(rows, width, dtype=BF16, device=device) for _ in range(2))
    return out, x, torch.randn(width, dtype=BF16, device=device), 1e-6


def _gate_inputs(width: int, rows: int, device: str) -> tuple:
    return torch.empty(rows, width, dtype=BF16, device=device), torch.randn(rows, 2 * width, dtype=BF16, device=device)


def _store_inputs(rows: int, device: str) -> tuple:
    caches = tuple(torch.zeros(rows, HEADS, DIM, dtype=BF16, device=device) for _ in range(2))
    new = tuple(torch.randn(rows, HEADS, DIM, dtype=BF16, device=device) for _ in range(2))
    return *caches, *new, torch.randperm(rows, device=device).int()


def _with_options(options: Options, function: Callable[..., None], args: tuple) -> None:
    # Set by hand: a patch of unittest.mock takes so long that the device would wait for it.
    rule = option_tables.row_options
    option_tables.row_options = lambda *facts: options  # type: ignore[assignment]
    try:
        function(*args)
    finally:
        option_tables.row_options = rule


def _sources(options: Options, function: Callable[..., None], make: Make) -> list[tuple[Any, Options]]:
    seen: list[tuple] = []

    def note(kernel: Kernel, grid: tuple, args: tuple, constants: tuple, chosen: Options) -> None:
        types = [None if arg is None else arg.dtype for arg in args[: kernel.num_pointers]]
        seen.append((kernel.source(types, True, 16, constants), chosen))

    with mock.patch.object(Kernel, "__call__", note):
        _with_options(options, function, make(1, "cpu"))
    return seen


@dataclass
class RowProblem:
    rows: int
    function: Callable[..., None]
    make: Make
    data: tuple = field(default_factory=tuple)

    @property
    def name(self) -> str:
        return f"{self.function.__name__} {self.rows} rows"

    def run(self, candidate: Candidate) -> Tensor:
        if not self.data:
            self.data = self.make(self.rows, "cuda")
        _with_options(candidate.config, self.function, self.data)
        return self.data[0]

    def rate(self, us: float) -> str:
        tensors = [one for one in self.data if isinstance(one, Tensor)]
        return f"{sum(one.numel() * one.element_size() for one in tensors) / us * 1e-6:.2f} TB/s"

    def release(self) -> None:
        self.data = ()


def _table(name: str, size: int, function: Callable[..., None], make: Make) -> Table:
    candidates = []
    for num_warps in (1, 2, 4, 8, 16, 32):
        elements_per_lane = size / num_warps / 32
        if 1 <= elements_per_lane <= 64:
            options = Options(num_warps=num_warps, num_stages=1)
            candidates.append(Candidate({"num_warps": num_warps}, options, partial(_sources, options, function, make)))
    return Table(name, size, candidates, lambda: [RowProblem(rows, function, make) for rows in ROWS])


def tables() -> list[Table]:
    norms = [_table("norm", width, norm.rms_norm, partial(_norm_inputs, width)) for width in (1024, 2048, 4096, 8192, 16384)]
    gates = [_table("gate", min(width, 2048), activation.silu_and_mul, partial(_gate_inputs, width)) for width in (1024, 8192)]
    return [*norms, *gates, _table("store", HEADS * DIM, kvcache.store_kv, _store_inputs)]

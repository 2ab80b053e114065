"""What benchmarks/tune_triton.py tunes: tables of candidates, the problems they are timed on, and the timer."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

# Larger than any L2 or last-level cache of a GPU in question.
FLUSH_BYTES = 512 << 20


class Candidate(NamedTuple):
    """One configuration: its entry in the tuned table, the object the problems take, and how to get its sources for compiling."""

    entry: dict[str, Any]
    config: Any
    sources: Callable[[], list[tuple[Any, Any]]]


class Problem(Protocol):
    """One set of inputs, made on the first run and dropped by `release`."""

    name: str

    def run(self, candidate: Candidate) -> Tensor: ...

    def rate(self, us: float) -> str: ...

    def release(self) -> None: ...


class Table(NamedTuple):
    """One table of tables.TUNED_FILE at one size. `problems` builds nothing big until a problem runs."""

    name: str
    size: int
    candidates: list[Candidate]
    problems: Callable[[], list[Any]]


class Timer:
    """Median device time of a call, with the L2 flushed before each."""

    def __init__(self, warmup: int = 2, repeats: int = 11) -> None:
        self.warmup, self.repeats = warmup, repeats
        self.trash = torch.empty(FLUSH_BYTES // 4, dtype=torch.int32, device="cuda")

    def median_us(self, call: Callable[[], object]) -> float:
        for _ in range(self.warmup):
            call()
        events = []
        for _ in range(self.repeats):
            self.trash.zero_()
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            events.append((begin, end))
        torch.cuda.synchronize()
        return statistics.median(begin.elapsed_time(end) for begin, end in events) * 1000

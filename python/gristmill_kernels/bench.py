"""`python -m gristmill_kernels bench`: times the kernels on this machine, beside the memory bandwidth that it has.

Nearly every one of these kernels is limited by memory, so each row says how many bytes its problem has to move at the least, what
that makes per second, and which share of the best plain copy or read of the same run that is. A GPU is timed with CUDA events, a CPU by
the clock, one call at a time over a flushed cache. Medians.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gristmill_kernels as kernels
from gristmill_kernels import dispatch, selftest

HEADS, KV_HEADS, DIM, HIDDEN = 32, 8, 128, 4096  # a layer of Llama 3 8B
VOCABULARY, INTERMEDIATE = 128_256, 14_336
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))


class Size(NamedTuple):
    """How large the problems are: rows of a prefill step, batch of a decode step, and (batch, length) of the decode attention rows."""

    tokens: int
    batch: int
    decode: tuple[tuple[int, int], ...]
    flush_bytes: int
    copy_bytes: int
    weights: tuple[tuple[int, int], ...] = WEIGHTS
    vocabulary: int = VOCABULARY


GPU = Size(4096, 64, ((64, 4096), (8, 16384), (1, 65536)), 256 << 20, 1 << 30)
CPU = Size(512, 8, ((8, 1024), (2, 4096), (1, 8192)), 64 << 20, 256 << 20)
QUICK = Size(8, 2, ((2, 64), (1, 300)), 1 << 16, 1 << 16, ((64, 96),), 500)


class Row(NamedTuple):
    """One line of the table: `build` makes the call; `bytes` is the least that the problem moves."""

    name: str
    op: str
    bytes: int
    build: Callable[[], Callable[[], Any]]


class Inputs:
    """Random tensors on a device."""

    def __init__(self, device: str, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype

    def normal(self, *shape: int) -> Tensor:
        return torch.randn(shape, device=self.device, dtype=self.dtype)

    def ints(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)

    def shuffled(self, count: int) -> Tensor:
        return torch.randperm(count, device=self.device).to(torch.int32)

    def lists(self, batch: int, length: int) -> tuple[Tensor, Tensor]:
        """Requests of equal length over slots in random order."""
        return torch.arange(batch + 1, dtype=torch.int32, device=self.device) * length, self.shuffled(batch * length)


def attention_rows(new: Inputs, size: Size) -> Iterator[Row]:
    for batch, length in size.decode:

        def build(batch: int = batch, length: int = length) -> Callable[[], Any]:
            total = batch * length
            q, k, v = new.normal(batch, HEADS, DIM), new.normal(total, KV_HEADS, DIM), new.normal(total, KV_HEADS, DIM)
            lists, out = new.lists(batch, length), torch.empty_like(q)
            return lambda: kernels.decode_attention(q, k, v, *lists, out=out)

        yield Row(f"decode attention B{batch} S{length}", "decode_attention", _bytes(new, 2 * batch * length * KV_HEADS * DIM), build)


def token_rows(new: Inputs, size: Size) -> Iterator[Row]:
    """What runs once per layer over the rows of a step, for a prefill and for a decode step."""
    for rows in (size.tokens, size.batch):

        def norm(rows: int = rows) -> Callable[[], Any]:
            x, weight, out = new.normal(rows, HIDDEN), new.normal(HIDDEN), new.normal(rows, HIDDEN)
            return lambda: kernels.rms_norm(x, weight, out=out)

        def added(rows: int = rows) -> Callable[[], Any]:
            x, residual, weight = new.normal(rows, HIDDEN), new.normal(rows, HIDDEN), new.normal(HIDDEN)
            return lambda: kernels.fused_add_rms_norm(x, residual, weight)

        def rope(rows: int = rows) -> Callable[[], Any]:
            q, k = new.normal(rows, HEADS, DIM), new.normal(rows, KV_HEADS, DIM)
            table = torch.rand(rows, DIM, device=new.device)
            positions = torch.arange(rows, dtype=torch.int32, device=new.device)
            return lambda: kernels.apply_rope(q, k, positions, table)

        def gate(rows: int = rows) -> Callable[[], Any]:
            x, out = new.normal(rows, 2 * INTERMEDIATE), new.normal(rows, INTERMEDIATE)
            return lambda: kernels.silu_and_mul(x, out=out)

        def store(rows: int = rows) -> Callable[[], Any]:
            k, v = new.normal(rows, KV_HEADS, DIM), new.normal(rows, KV_HEADS, DIM)
            pools, slots = (new.normal(2 * rows, KV_HEADS, DIM), new.normal(2 * rows, KV_HEADS, DIM)), new.shuffled(2 * rows)[:rows]
            return lambda: kernels.store_kv(k, v, *pools, slots)

        def tokens(rows: int = rows) -> Callable[[], Any]:
            x = new.normal(rows, HIDDEN)
            codes, scales = kernels.per_token_quant_fp8(x)
            return lambda: kernels.per_token_quant_fp8(x, out=codes, scales=scales)

        def groups(rows: int = rows) -> Callable[[], Any]:
            x = new.normal(rows, HIDDEN)
            codes, scales = kernels.per_group_quant_fp8(x)
            return lambda: kernels.per_group_quant_fp8(x, out=codes, scales=scales)

        yield Row(f"rms_norm {rows} rows", "rms_norm", _bytes(new, 2 * rows * HIDDEN), norm)
        yield Row(f"fused_add_rms_norm {rows} rows", "fused_add_rms_norm", _bytes(new, 4 * rows * HIDDEN), added)
        rotated = _bytes(new, 2 * rows * (HEADS + KV_HEADS) * DIM) + rows * DIM * 4
        yield Row(f"apply_rope {rows} rows", "apply_rope", rotated, rope)
        yield Row(f"silu_and_mul {rows} rows", "silu_and_mul", _bytes(new, 3 * rows * INTERMEDIATE), gate)
        quantised = _bytes(new, rows * HIDDEN) + rows * HIDDEN
        yield Row(f"per_token_quant_fp8 {rows} rows", "per_token_quant_fp8", quantised + 4 * rows, tokens)
        yield Row(f"per_group_quant_fp8 {rows} rows", "per_group_quant_fp8", quantised + 4 * rows * HIDDEN // 128, groups)
        yield Row(f"store_kv {rows} rows", "store_kv", _bytes(new, 4 * rows * KV_HEADS * DIM), store)


def step_rows(new: Inputs, size: Size) -> Iterator[Row]:
    """What runs once per decode step."""
    batch, vocabulary, length = size.batch, size.vocabulary, size.decode[0][1]

    def indices() -> Callable[[], Any]:
        table = new.shuffled(batch * length).view(batch, length)
        slots, lens = new.shuffled(batch), new.ints(*[length] * batch)
        indptr, out = new.ints(*[0] * (batch + 1)), torch.empty_like(table.view(-1))
        return lambda: kernels.kv_indices(table, slots, lens, indptr=indptr, out=out)

    def greedy() -> Callable[[], Any]:
        logits, out = new.normal(batch, vocabulary), new.ints(*[0] * batch)
        return lambda: kernels.greedy(logits, out=out)

    def sample() -> Callable[[], Any]:
        logits, out = new.normal(batch, vocabulary), new.ints(*[0] * batch)
        one = torch.ones(batch, device=new.device)
        parameters = (one, new.ints(*[50] * batch), 0.95 * one, 0 * one)
        seeds = torch.arange(batch, device=new.device)
        return lambda: kernels.sample(logits, *parameters, seeds, seeds.int(), out=out)

    yield Row(f"kv_indices B{batch} S{length}", "kv_indices", 2 * batch * length * 4, indices)
    yield Row(f"greedy B{batch} V{vocabulary}", "greedy", _bytes(new, batch * vocabulary), greedy)
    yield Row(f"sample B{batch} V{vocabulary}", "sample", _bytes(new, batch * vocabulary), sample)


def weight_rows(new: Inputs, size: Size) -> Iterator[Row]:
    """One row times the weights of a layer: on a CPU packed, on a GPU as they are."""
    for n, k in size.weights:

        def skinny(n: int = n, k: int = k) -> Callable[[], Any]:
            x, weight, out = new.normal(1, k), new.normal(n, k), new.normal(1, n)
            return lambda: kernels.skinny_linear(x, weight, out=out)

        def packed(n: int = n, k: int = k) -> Callable[[], Any]:
            x, weight, out = new.normal(1, k), kernels.pack_linear(new.normal(n, k)), new.normal(1, n)
            return lambda: kernels.linear(x, weight, out=out)

        if new.device == "cpu":
            yield Row(f"linear M1 N{n} K{k}", "packed_linear", _bytes(new, n * k), packed)
        else:
            yield Row(f"skinny_linear M1 N{n} K{k}", "skinny_linear", _bytes(new, n * k), skinny)


EXPERTS, CHOSEN, EXPERT_BLOCK = 128, 8, 64  # a layer of Qwen3-MoE


def expert_rows(new: Inputs, size: Size) -> Iterator[Row]:
    """The routing of a mixture of experts, for a prefill and for a decode step."""
    for rows in (size.tokens, size.batch):

        def route(rows: int = rows) -> Callable[[], Any]:
            logits, weights = new.normal(rows, EXPERTS), torch.empty(rows, CHOSEN, device=new.device)
            ids = torch.empty(rows, CHOSEN, dtype=torch.int32, device=new.device)
            return lambda: kernels.topk_softmax(logits, CHOSEN, True, weights=weights, ids=ids)

        def align(rows: int = rows) -> Callable[[], Any]:
            ids = new.normal(rows, EXPERTS).float().topk(CHOSEN).indices.to(torch.int32)
            return lambda: kernels.align_block_size(ids, EXPERTS, EXPERT_BLOCK)

        yield Row(f"topk_softmax {rows} rows", "topk_softmax", _bytes(new, rows * EXPERTS) + 8 * rows * CHOSEN, route)
        yield Row(f"align_block_size {rows} rows", "align_block_size", 8 * rows * CHOSEN, align)


def _bytes(new: Inputs, elements: int) -> int:
    return elements * new.dtype.itemsize


def all_rows(new: Inputs, size: Size) -> Iterator[Row]:
    for part in (attention_rows, token_rows, step_rows, expert_rows, weight_rows):
        yield from part(new, size)


class Clock:
    """Microseconds of one call at a time, each over a flushed cache."""

    def __init__(self, device: str, size: Size, repeats: int) -> None:
        self.device, self.repeats = device, repeats
        self.trash = torch.zeros(size.flush_bytes // 4, dtype=torch.int32, device=device)

    def __call__(self, call: Callable[[], Any]) -> list[float]:
        for _ in range(2):  # compiles, and lets the allocator grow
            call()
        return self._on_gpu(call) if self.device == "cuda" else self._on_cpu(call)

    def _on_cpu(self, call: Callable[[], Any]) -> list[float]:
        times = []
        for _ in range(self.repeats):
            self.trash.add_(1)
            begin = time.perf_counter()
            call()
            times.append((time.perf_counter() - begin) * 1e6)
        return times

    def _on_gpu(self, call: Callable[[], Any]) -> list[float]:
        pairs = []
        for _ in range(self.repeats):
            self.trash.zero_()  # also keeps the device busy while the host prepares the launch
            begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            begin.record()
            call()
            end.record()
            pairs.append((begin, end))
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) * 1e3 for begin, end in pairs]


def ceilings(device: str, size: Size, clock: Clock) -> dict[str, float]:
    """GB/s of a plain copy and of a plain read, by torch."""
    source = torch.ones(size.copy_bytes // 4, device=device)
    target = torch.empty_like(source)
    moved = source.numel() * 4
    return {
        "copy": 2 * moved / statistics.median(clock(lambda: target.copy_(source))) * 1e-3,
        "read": moved / statistics.median(clock(lambda: source.sum())) * 1e-3,
    }


def measure(row: Row, clock: Clock, best: float) -> dict[str, Any]:
    """One line, or why there is none."""
    record: dict[str, Any] = {"row": row.name, "op": row.op, "bytes": row.bytes}
    if row.op not in dispatch.OPS:
        return record | {"left_out": "this build has no such operator"}
    dispatch.reset()
    try:
        us = clock(row.build())
    except Exception as error:  # a table with a gap says more than none
        return record | {"left_out": f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"}
    middle = statistics.median(us)
    rate = row.bytes / middle * 1e-3
    record |= {"implementation": dispatch.chosen_families().get(row.op), "us": middle, "us_min": min(us), "us_max": max(us)}
    return record | {"GB/s": rate, "of_ceiling": rate / best}


def show(record: dict[str, Any]) -> str:
    if "left_out" in record:
        return f"{record['row']:<38}left out: {record['left_out']}"
    numbers = f"{record['us']:>11.1f}{record['GB/s']:>10.1f}{record['of_ceiling']:>9.0%}"
    return f"{record['row']:<38}{record['implementation'] or '':<12}{numbers}"


HEADER = f"{'row':<38}{'runs in':<12}{'us':>11}{'GB/s':>10}{'ceiling':>9}"


def main(arguments: list[str] | None = None) -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(
        prog="python -m gristmill_kernels bench",
        description="Time the kernels on this machine, next to the memory bandwidth of a plain copy and a plain read. Medians.",
    )
    parser.add_argument("--device", default=selftest.default_device(), help="cpu or cuda (default: %(default)s)")
    parser.add_argument("--family", choices=list(dispatch.FAMILIES), help="only this implementation (default: what dispatch chooses)")
    parser.add_argument("--rows", default="", metavar="TEXT", help="only rows whose name contains this")
    parser.add_argument("--repeats", type=int, default=21, help="calls per row (default: %(default)s)")
    parser.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], default="bfloat16", help="of the data (default: %(default)s)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny shapes: shows that everything runs, not how fast")
    parser.add_argument("--json", type=Path, help="also write the results here")
    options = parser.parse_args(arguments)
    if options.repeats < 1:
        parser.error("--repeats should be at least 1")
    if (reason := selftest.absent(options.device)) is not None:
        print(f"gristmill_kernels bench: {reason}", file=sys.stderr)
        return 1
    with warnings.catch_warnings(), contextlib.ExitStack() as stack:
        warnings.simplefilter("ignore", RuntimeWarning)  # the table names the implementation
        if options.family is not None:
            stack.enter_context(dispatch.using(options.family))
        report = run(options)
    if options.json is None:
        return 0
    try:
        options.json.write_text(json.dumps(report, indent=1) + "\n")
    except OSError as error:
        print(f"gristmill_kernels bench: the results cannot be written: {error}", file=sys.stderr)
        return 1
    print(f"wrote {options.json}")
    return 0


def run(options: argparse.Namespace) -> dict[str, Any]:
    """Print the table line by line; returns what --json writes."""
    size = QUICK if options.quick else GPU if options.device == "cuda" else CPU
    torch.manual_seed(0)
    clock = Clock(options.device, size, options.repeats)
    found = ceilings(options.device, size, clock)
    report: dict[str, Any] = {
        "version": kernels.__version__,
        "torch": torch.__version__,
        "device": selftest.device_name(options.device),
        "threads": torch.get_num_threads() if options.device == "cpu" else None,
        "dtype": options.dtype,
        "quick": options.quick,
        "repeats": options.repeats,
        "ceilings": found,
        "rows": [],
    }
    print(f"gristmill_kernels {report['version']}  torch {report['torch']}  {report['device']}  {options.dtype}")
    print(f"ceiling: copy {found['copy']:.1f} GB/s, read {found['read']:.1f} GB/s; a share above 100% reads from a cache", HEADER, sep="\n")
    for row in all_rows(Inputs(options.device, getattr(torch, options.dtype)), size):
        if options.rows in row.name:
            report["rows"].append(record := measure(row, clock, max(found.values())))
            print(show(record), flush=True)
    return report

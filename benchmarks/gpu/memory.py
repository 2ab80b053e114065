"""The rows of gpu_kernels.py that memory bandwidth limits: implementation families and PyTorch side by side.

Each row has as many sets of inputs as exceed every cache together. A peer's calls over all sets are one CUDA graph, which is replayed;
a time is the replay's, over the number of sets. Bytes are the least that the problem moves; shares are of the copy or of the read of the
same run.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

import gristmill_kernels as gk
from gristmill_kernels import dispatch

HEADS, KV_HEADS, DIM, HIDDEN, INTERMEDIATE, VOCABULARY = 32, 8, 128, 4096, 14336, 128_256  # Llama 3 8B
WEIGHTS = ((6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336))
ROTATED_BYTES = 256 << 20
FAMILIES = ("native", "triton")
Call = Callable[[], Any]


class MemoryRow(NamedTuple):
    """`build` makes one set of inputs: our call, and PyTorch's where it has one. `reads`: next to nothing of the bytes is written.
    `only_reads` times a kernel that reads as many bytes in one launch and does nothing else: a launch of some microseconds spends a part of
    them on beginning and ending."""

    name: str
    bytes: int
    reads: bool
    build: Callable[[], tuple[Call, Call | None]]
    only_reads: bool = False


def _normal(*shape: int) -> Tensor:
    return torch.randn(shape, device="cuda", dtype=torch.bfloat16)


def _shuffled(count: int) -> Tensor:
    return torch.randperm(count, device="cuda").to(torch.int32)


def norm_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        x, weight, out = _normal(rows, HIDDEN), _normal(HIDDEN), _normal(rows, HIDDEN)
        return lambda: gk.rms_norm(x, weight, out=out), lambda: torch.nn.functional.rms_norm(x, (HIDDEN,), weight, 1e-6)

    return MemoryRow(f"rms_norm [{rows}, {HIDDEN}]", 4 * rows * HIDDEN, False, build)


def add_norm_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        x, residual, weight = _normal(rows, HIDDEN), _normal(rows, HIDDEN), _normal(HIDDEN)
        return lambda: gk.fused_add_rms_norm(x, residual, weight), None

    return MemoryRow(f"fused_add_rms_norm [{rows}, {HIDDEN}]", 8 * rows * HIDDEN, False, build)


def rope_row(rows: int, store: bool) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        q, k, v = _normal(rows, HEADS, DIM), _normal(rows, KV_HEADS, DIM), _normal(rows, KV_HEADS, DIM)
        pools, slots = (_normal(2 * rows, KV_HEADS, DIM), _normal(2 * rows, KV_HEADS, DIM)), _shuffled(2 * rows)[:rows]
        table, positions = torch.rand(rows, DIM, device="cuda"), torch.arange(rows, dtype=torch.int32, device="cuda")
        if store:
            return lambda: gk.apply_rope_store_kv(q, k, v, *pools, positions, slots, table), None
        return lambda: gk.apply_rope(q, k, positions, table), None

    heads = 2 * HEADS + (5 if store else 2) * KV_HEADS  # q and k both ways; with the store k once more, v both ways
    name = "apply_rope_store_kv" if store else "apply_rope"
    return MemoryRow(f"{name} {rows} rows", rows * (2 * heads + 4) * DIM, False, build)


def gate_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        x, out = _normal(rows, 2 * INTERMEDIATE), _normal(rows, INTERMEDIATE)
        gate, up = x.chunk(2, -1)
        return lambda: gk.silu_and_mul(x, out=out), lambda: torch.nn.functional.silu(gate) * up

    return MemoryRow(f"silu_and_mul [{rows}, {2 * INTERMEDIATE}]", 6 * rows * INTERMEDIATE, False, build)


def store_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        k, v = _normal(rows, KV_HEADS, DIM), _normal(rows, KV_HEADS, DIM)
        (k_cache, v_cache), slots = (_normal(2 * rows, KV_HEADS, DIM), _normal(2 * rows, KV_HEADS, DIM)), _shuffled(2 * rows)[:rows]
        wide = slots.long()

        def theirs() -> None:
            k_cache[wide] = k
            v_cache[wide] = v

        return lambda: gk.store_kv(k, v, k_cache, v_cache, slots), theirs

    return MemoryRow(f"store_kv {rows} rows", 8 * rows * KV_HEADS * DIM, False, build)


def greedy_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        logits, out = _normal(rows, VOCABULARY), torch.empty(rows, dtype=torch.int32, device="cuda")
        return lambda: gk.greedy(logits, out=out), lambda: logits.argmax(-1)

    return MemoryRow(f"greedy [{rows}, {VOCABULARY}]", 2 * rows * VOCABULARY, True, build)


def sample_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        logits, out = _normal(rows, VOCABULARY), torch.empty(rows, dtype=torch.int32, device="cuda")
        temperature, top_p, min_p = (torch.full((rows,), value, device="cuda") for value in (0.8, 0.95, 0.0))
        top_k, positions = (torch.full((rows,), value, dtype=torch.int32, device="cuda") for value in (50, 3))
        seeds = torch.arange(rows, device="cuda")
        return lambda: gk.sample(logits, temperature, top_k, top_p, min_p, seeds, positions, out=out), None

    return MemoryRow(f"sample [{rows}, {VOCABULARY}] top-k 50 top-p 0.95", 2 * rows * VOCABULARY, True, build)


def indices_row(batch: int, length: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        table, slots = _shuffled(batch * length).view(batch, length), _shuffled(batch)
        lens, indptr = (torch.full((count,), length, dtype=torch.int32, device="cuda") for count in (batch, batch + 1))
        out = torch.empty(batch * length, dtype=torch.int32, device="cuda")
        return lambda: gk.kv_indices(table, slots, lens, indptr=indptr, out=out), None

    return MemoryRow(f"kv_indices B{batch} S{length}", 8 * batch * length, False, build)


def draft_row(batch: int, length: int, steps: int, topk: int) -> MemoryRow:
    branches, total = batch * topk, batch * topk * (length * steps + steps * (steps + 1) // 2)

    def build() -> tuple[Call, Call | None]:
        columns = length + topk * steps
        table, slots = _shuffled(batch * columns).view(batch, columns), _shuffled(batch)
        lens = torch.full((batch,), length, dtype=torch.int32, device="cuda")
        indptr = torch.empty(steps, branches + 1, dtype=torch.int32, device="cuda")
        out = torch.empty(steps, branches * (length + steps), dtype=torch.int32, device="cuda")
        return lambda: gk.draft_kv_indices(table, slots, lens, steps, topk, indptr=indptr, out=out), None

    return MemoryRow(f"draft_kv_indices B{batch} S{length} {steps}x{topk}", 4 * (batch * length + total), False, build)


def extend_row(batch: int, tokens: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        prefixes, lens, last = (torch.full((batch,), value, dtype=torch.int32, device="cuda") for value in (37, 37 + tokens, 36))
        out, count, free = (
            torch.empty(batch * tokens, dtype=torch.int32, device="cuda"),
            torch.empty_like(lens[:1]),
            _shuffled(batch * tokens),
        )
        return lambda: gk.alloc_extend(prefixes, lens, last, free, 16, out=out, num_pages=count), None

    return MemoryRow(f"alloc_extend B{batch} {tokens} tokens page 16", 4 * batch * tokens, False, build)


def merge_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        o_a, o_b, out = _normal(rows, HEADS, DIM), _normal(rows, HEADS, DIM), _normal(rows, HEADS, DIM)
        lse_a, lse_b, lse = (torch.randn(rows, HEADS, device="cuda") for _ in range(3))
        return lambda: gk.merge_state(o_a, lse_a, o_b, lse_b, out=out, lse=lse), None

    return MemoryRow(f"merge_state {rows} rows", rows * HEADS * (6 * DIM + 12), False, build)


def experts_row(tokens: int) -> MemoryRow:
    """128 experts, as in Qwen3-MoE."""

    def build() -> tuple[Call, Call | None]:
        logits, experts = _normal(tokens, 128), 8
        weights, ids = torch.empty(tokens, experts, device="cuda"), torch.empty(tokens, experts, dtype=torch.int32, device="cuda")
        ours = lambda: gk.topk_softmax(logits, experts, True, weights=weights, ids=ids)  # noqa: E731
        return ours, lambda: torch.topk(logits.float().softmax(-1), experts)

    return MemoryRow(f"topk_softmax [{tokens}, 128] top 8", tokens * (2 * 128 + 8 * 8), True, build)


def groups_row(tokens: int) -> MemoryRow:
    """256 experts in 8 groups, as in DeepSeek-V3."""

    def build() -> tuple[Call, Call | None]:
        logits, bias = _normal(tokens, 256), torch.randn(256, device="cuda")
        weights, ids = torch.empty(tokens, 8, device="cuda"), torch.empty(tokens, 8, dtype=torch.int32, device="cuda")
        options: dict[str, Any] = {"num_groups": 8, "topk_groups": 4, "scoring": "sigmoid", "renormalize": True, "scaling": 2.5}
        return lambda: gk.grouped_topk(logits, 8, bias=bias, weights=weights, ids=ids, **options), None

    return MemoryRow(f"grouped_topk [{tokens}, 256] top 8 of 4 groups", tokens * (2 * 256 + 8 * 8), True, build)


def align_row(tokens: int, block: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        ids = torch.randn(tokens, 256, device="cuda").topk(8).indices.to(torch.int32)
        room = gk.max_expert_blocks(8 * tokens, 256, block)
        entries, owners, padded = (torch.empty(count, dtype=torch.int32, device="cuda") for count in (room * block, room, 1))
        outputs = {"sorted_token_ids": entries, "expert_ids": owners, "num_tokens_post_padded": padded}
        return lambda: gk.align_block_size(ids, 256, block, **outputs), None

    room = gk.max_expert_blocks(8 * tokens, 256, block)
    return MemoryRow(f"align_block_size [{tokens}, 8] of 256, blocks of {block}", 4 * (8 * tokens + room * (block + 1)), False, build)


def quant_row(op: str, rows: int, width: int = HIDDEN) -> MemoryRow:
    """From bfloat16 to 8 bits; `op` is a quantising function of x alone."""

    def build() -> tuple[Call, Call | None]:
        x = _normal(rows, width)
        outputs = getattr(gk, op)(x)
        return lambda: getattr(gk, op)(x, out=outputs[0], scales=outputs[1]), None

    groups = width // 128 if op == "per_group_quant_fp8" else 1
    return MemoryRow(f"{op} [{rows}, {width}]", rows * (3 * width + 4 * groups), False, build)


def static_quant_row(rows: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        x, scale = _normal(rows, HIDDEN), torch.tensor([0.01], device="cuda")
        out = gk.quant_fp8(x, scale)
        return lambda: gk.quant_fp8(x, scale, out=out), lambda: (x / scale).to(torch.float8_e4m3fn)

    return MemoryRow(f"quant_fp8 [{rows}, {HIDDEN}]", 3 * rows * HIDDEN, False, build)


def skinny_row(m: int, n: int, k: int) -> MemoryRow:
    def build() -> tuple[Call, Call | None]:
        x, weight, out = _normal(m, k), _normal(n, k), _normal(m, n)
        transposed = weight.T
        return lambda: gk.skinny_linear(x, weight, out=out), lambda: torch.mm(x, transposed, out=out)

    return MemoryRow(f"skinny_linear M{m} [{n}, {k}]", 2 * (n * k + m * (n + k)), True, build, only_reads=True)


QUANT_ROWS = tuple(partial(quant_row, op) for op in ("per_token_quant_fp8", "per_token_quant_int8", "per_group_quant_fp8"))


def memory_rows() -> list[MemoryRow]:
    rows = [make(count) for count in (64, 4096) for make in (norm_row, add_norm_row, gate_row, store_row, merge_row)]
    rows += [rope_row(count, store) for count in (64, 4096) for store in (False, True)]
    rows += [greedy_row(64), sample_row(64)]
    rows += [indices_row(64, 4096), indices_row(1, 131_072), draft_row(16, 1024, 5, 4), extend_row(16, 512)]
    rows += [make(tokens) for make in (experts_row, groups_row) for tokens in (64, 4096, 65536)]
    rows += [align_row(tokens, block) for tokens, block in ((64, 16), (128, 16), (512, 64), (4096, 64), (16384, 128))]
    rows += [make(count) for count in (64, 4096) for make in (static_quant_row, *QUANT_ROWS)]
    rows += [make(4096, INTERMEDIATE) for make in QUANT_ROWS]
    return rows + [skinny_row(m, n, k) for m in (1, 4, 16) for n, k in WEIGHTS]


def replay_us(calls: list[Call], repeats: int) -> float:
    """Median microseconds of one call when all are replayed in a row."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for call in calls[:3]:
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for call in calls:
            call()
    times = []
    for _ in range(repeats + 1):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1000 / len(calls))
    return statistics.median(times[1:])


def ceilings(repeats: int) -> dict[str, float]:
    """TB/s of a copy by a kernel (a captured `copy_` goes to a copy engine, which is slower) and of a kernel that reads, over 1 GiB."""
    from benchmarks.gpu.reading import read, sums_for

    here, there = (torch.ones(1 << 28, device="cuda") for _ in range(2))
    sums = sums_for(here)
    return {
        "copy": 2 * 4 * here.numel() / replay_us([lambda: torch.neg(here, out=there)], repeats) * 1e-6,
        "read": 4 * here.numel() / replay_us([lambda: read(here, sums)], repeats) * 1e-6,
    }


def reading_us(byte_count: int, repeats: int) -> float:
    """Microseconds of a launch that only reads so many bytes, among others of its kind."""
    from benchmarks.gpu.reading import read, sums_for

    sources = [torch.ones(byte_count // 4, dtype=torch.int32, device="cuda") for _ in range(max(2, -(-ROTATED_BYTES // byte_count)))]
    sums = sums_for(sources[0])
    return replay_us([lambda source=source: read(source, sums) for source in sources], repeats)


def run_row(row: MemoryRow, ceiling: dict[str, float], repeats: int) -> dict[str, Any]:
    """Times of every family and of PyTorch; who cannot is left out with the reason."""
    torch.manual_seed(0)
    sets = [row.build() for _ in range(max(2, min(64, -(-ROTATED_BYTES // row.bytes))))]
    record: dict[str, Any] = {"row": row.name, "bytes": row.bytes, "peers": {}, "left_out": {}}
    bound = ceiling["read" if row.reads else "copy"]

    def measure(peer: str, calls: list[Call]) -> None:
        try:
            us = replay_us(calls, repeats)
        except Exception as error:
            record["left_out"][peer] = f"{type(error).__name__}: {str(error)[:200]}"
            return
        rate = row.bytes / us * 1e-6
        record["peers"][peer] = {"us": us, "TB/s": rate, "share": rate / bound}

    for family in FAMILIES:
        with dispatch.using(family):
            measure(family, [ours for ours, _ in sets])
    theirs = [call for _, call in sets if call is not None]
    if theirs:
        measure("torch", theirs)
    peers = record["peers"]
    if row.only_reads:
        alone = reading_us(row.bytes, repeats)
        record["only reading us"] = alone
        for entry in peers.values():
            entry["share of only reading"] = alone / entry["us"]
    ours = peers.get("native") or peers.get("triton")
    for entry in peers.values():
        if ours is not None and entry is not ours:
            entry["ratio"] = entry["us"] / ours["us"]
    return record


def show(record: dict[str, Any]) -> str:
    parts = []
    for peer, entry in record["peers"].items():
        ratio = f" (x{entry['ratio']:.2f})" if "ratio" in entry else ""
        reading = f" ({entry['share of only reading']:.0%} of a reading launch)" if "share of only reading" in entry else ""
        parts.append(f"{peer} {entry['us']:.1f} us {entry['TB/s']:.2f} TB/s {entry['share']:.0%}{reading}{ratio}")
    left_out = "".join(f"\n    {peer} left out: {why}" for peer, why in record["left_out"].items())
    return f"{record['row']:<44}" + "   ".join(parts) + left_out

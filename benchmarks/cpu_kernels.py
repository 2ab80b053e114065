"""The CPU kernels of gristmill_kernels and their PyTorch counterparts, alternating in one run: medians, ratios, bytes/s and FLOP/s.

    python benchmarks/cpu_kernels.py [--only linear] [--rounds 9] [--threads 2] [--clock wall|cpu] [--out benchmarks/results]

A ratio is the median over rounds of torch / ours within the round: above 1 ours is faster. `--clock cpu` measures the CPU time of one
thread, which a busy machine disturbs less than wall time. GB/s counts every byte of weights or KV read once.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import json
import os
import platform
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

import gristmill_kernels as gk

MIN_SAMPLE_S = 0.01  # calls are repeated until a sample takes about this long
HEADS, KV_HEADS, HEAD_DIM = 32, 8, 128
HIDDEN, VOCAB = 4096, 128_256


class Case(NamedTuple):
    name: str
    ours: Callable[[], Any]
    torch: Callable[[], Any]
    read_bytes: int = 0
    flops: int = 0


def name_of(dtype: torch.dtype) -> str:
    return {torch.float32: "fp32", torch.bfloat16: "bf16"}[dtype]


def linear_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        weight = (torch.randn(HIDDEN, HIDDEN) / 64).to(dtype)
        packed = gk.pack_linear(weight)
        for rows in (1, 4, 16, 64, 512):
            x = torch.randn(rows, HIDDEN).to(dtype)
            out = torch.empty(rows, HIDDEN, dtype=dtype)
            yield Case(
                f"linear {HIDDEN}x{HIDDEN} M={rows} {name_of(dtype)}",
                lambda x=x, packed=packed, out=out: gk.linear(x, packed, out=out),
                lambda x=x, weight=weight: F.linear(x, weight),
                read_bytes=weight.numel() * weight.element_size(),
                flops=2 * rows * HIDDEN * HIDDEN,
            )


def decode_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for batch, length in ((1, 4096), (8, 1024), (16, 256)):
            total = batch * length
            q = torch.randn(batch, HEADS, HEAD_DIM).to(dtype)
            k, v = (torch.randn(total, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
            indptr = torch.arange(0, total + 1, length, dtype=torch.int32)
            out = torch.empty_like(q)
            dense_q = q.view(batch, HEADS, 1, HEAD_DIM)
            dense_k, dense_v = (x.view(batch, length, KV_HEADS, HEAD_DIM).transpose(1, 2) for x in (k, v))
            for order, slots in (("", torch.arange(total).int()), (" random slots", torch.randperm(total).int())):
                yield Case(
                    f"decode_attention B={batch} S={length}{order} {name_of(dtype)}",
                    lambda q=q, k=k, v=v, indptr=indptr, slots=slots, out=out: gk.decode_attention(q, k, v, indptr, slots, out=out),
                    lambda q=dense_q, k=dense_k, v=dense_v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True),
                    read_bytes=2 * total * KV_HEADS * HEAD_DIM * dtype.itemsize,
                )


def extend_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for length in (128, 512, 1024):
            q = torch.randn(length, HEADS, HEAD_DIM).to(dtype)
            k, v = (torch.randn(length, KV_HEADS, HEAD_DIM).to(dtype) for _ in range(2))
            indptr = torch.tensor([0, length], dtype=torch.int32)
            slots, out = torch.arange(length).int(), torch.empty_like(q)
            dense = [x.transpose(0, 1)[None] for x in (q, k, v)]
            yield Case(
                f"extend_attention causal T={length} {name_of(dtype)}",
                lambda q=q, k=k, v=v, indptr=indptr, slots=slots, out=out: gk.extend_attention(q, k, v, indptr, indptr, slots, out=out),
                lambda dense=dense: F.scaled_dot_product_attention(*dense, is_causal=True, enable_gqa=True),
                flops=2 * HEADS * HEAD_DIM * length * length,
            )


def row_cases() -> Iterator[Case]:
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 512):
            x, residual = (torch.randn(rows, HIDDEN).to(dtype) for _ in range(2))
            weight, out = torch.ones(HIDDEN, dtype=dtype), torch.empty(rows, HIDDEN, dtype=dtype)
            tail = f"{rows}x{HIDDEN} {name_of(dtype)}"
            yield Case(
                f"rms_norm {tail}",
                lambda x=x, weight=weight, out=out: gk.rms_norm(x, weight, out=out),
                lambda x=x, weight=weight: F.rms_norm(x, (HIDDEN,), weight, 1e-6),
            )
            yield Case(
                f"fused_add_rms_norm {tail}",
                lambda x=x.clone(), residual=residual.clone(), weight=weight: gk.fused_add_rms_norm(x, residual, weight),
                lambda x=x, residual=residual, weight=weight: F.rms_norm(x + residual, (HIDDEN,), weight, 1e-6),
            )
            gated = torch.randn(rows, 2 * HIDDEN).to(dtype)
            yield Case(
                f"silu_and_mul {tail}",
                lambda gated=gated, out=out: gk.silu_and_mul(gated, out=out),
                lambda gated=gated: F.silu(gated[:, :HIDDEN]) * gated[:, HIDDEN:],
            )
            yield rope_case(rows, dtype)


def rope_case(rows: int, dtype: torch.dtype) -> Case:
    q, k = torch.randn(rows, HEADS, HEAD_DIM).to(dtype), torch.randn(rows, KV_HEADS, HEAD_DIM).to(dtype)
    angles = torch.arange(4096)[:, None] / 10000 ** (torch.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    table = torch.cat([angles.cos(), angles.sin()], dim=1).float()
    positions = torch.arange(rows, dtype=torch.int32)
    cos, sin = (part.repeat(1, 2)[:rows, None].to(dtype) for part in table.chunk(2, dim=1))

    def rotate(x: torch.Tensor) -> torch.Tensor:
        low, high = x.chunk(2, dim=-1)
        return x * cos + torch.cat([-high, low], dim=-1) * sin

    return Case(f"apply_rope T={rows} {name_of(dtype)}", lambda: gk.apply_rope(q, k, positions, table), lambda: (rotate(q), rotate(k)))


def sampling_cases() -> Iterator[Case]:
    batch = 4
    logits = torch.randn(batch, VOCAB) * 3
    out = torch.empty(batch, dtype=torch.int32)
    yield Case(f"greedy {batch}x{VOCAB} fp32", lambda: gk.greedy(logits, out=out), lambda: logits.argmax(-1))
    seeds, positions = torch.arange(batch), torch.arange(batch, dtype=torch.int32)
    ones, zeros = torch.ones(batch), torch.zeros(batch)

    def sort_and_draw(top_k: int, top_p: float) -> torch.Tensor:
        values, ids = torch.topk(logits, top_k) if top_k else torch.sort(logits, dim=-1, descending=True)
        probabilities = values.softmax(-1)
        probabilities[probabilities.cumsum(-1) - probabilities >= top_p] = 0
        return ids.gather(1, torch.multinomial(probabilities, 1))

    plain = lambda: torch.multinomial(logits.softmax(-1), 1)  # noqa: E731
    for label, top_k, top_p, peer in (
        ("", 0, 1.0, plain),
        (" top_k=50 top_p=0.9", 50, 0.9, lambda: sort_and_draw(50, 0.9)),
        (" top_p=0.9", 0, 0.9, lambda: sort_and_draw(0, 0.9)),
    ):
        k, p = torch.full((batch,), top_k, dtype=torch.int32), torch.full((batch,), top_p)
        yield Case(
            f"sample {batch}x{VOCAB}{label} fp32", lambda k=k, p=p: gk.sample(logits, ones, k, p, zeros, seeds, positions, out=out), peer
        )


GROUPS = {"linear": linear_cases, "decode": decode_cases, "extend": extend_cases, "rows": row_cases, "sampling": sampling_cases}


def sample_time(call: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        call()
    return (clock() - start) / repeats


def measure(case: Case, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    repeats = {}
    for side, call in (("ours", case.ours), ("torch", case.torch)):
        call()
        repeats[side] = max(1, int(MIN_SAMPLE_S / max(1e-7, sample_time(call, 2, clock))))
    samples = [[sample_time(case.ours, repeats["ours"], clock), sample_time(case.torch, repeats["torch"], clock)] for _ in range(rounds)]
    ours, peer = (statistics.median(side) for side in zip(*samples))
    result = {"ours_us": round(ours * 1e6, 2), "torch_us": round(peer * 1e6, 2)}
    result["ratio"] = round(statistics.median(theirs / mine for mine, theirs in samples), 3)
    if case.read_bytes:
        result["ours_gb_per_s"] = round(case.read_bytes / ours / 1e9, 2)
    if case.flops:
        result["ours_gflop_per_s"] = round(case.flops / ours / 1e9, 1)
    return result


def read_ceiling(clock: Callable[[], float]) -> float:
    """GB/s of a dot product of a 256 MiB vector with itself, the best of seven."""
    x = torch.ones(64 << 20)
    return round(x.numel() * 4 / min(sample_time(lambda: torch.dot(x, x), 1, clock) for _ in range(7)) / 1e9, 2)


def machine() -> dict[str, Any]:
    cpu = ""
    with contextlib.suppress(OSError):
        cpu = next(
            (line.split(":", 1)[1].strip() for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")), ""
        )
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "date": datetime.date.today().isoformat(),
        "commit": commit,
        "cpu": cpu,
        "cores": len(os.sched_getaffinity(0)),
        "load_average": round(os.getloadavg()[0], 2),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "kernels_isa": gk.capabilities()["native"]["isa"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups to run, separated by commas (default: all)")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--clock", choices=("wall", "cpu"), default="wall")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    arguments = parser.parse_args()
    threads = 1 if arguments.clock == "cpu" else arguments.threads
    clock = time.thread_time if arguments.clock == "cpu" else time.perf_counter
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    report: dict[str, Any] = {"benchmark": "cpu_kernels", **machine(), "threads": threads, "clock": arguments.clock}
    report["read_ceiling_gb_per_s"] = read_ceiling(clock)
    report["results"] = {}
    print(f"{report['kernels_isa']}, {threads} threads, {arguments.clock} time, reads {report['read_ceiling_gb_per_s']} GB/s", flush=True)
    for group in arguments.only.split(","):
        for case in GROUPS[group]():
            result = report["results"][case.name] = measure(case, arguments.rounds, clock)
            extra = "  ".join(
                f"{result[key]} {unit}" for key, unit in (("ours_gb_per_s", "GB/s"), ("ours_gflop_per_s", "GFLOP/s")) if key in result
            )
            times = f"ours {result['ours_us']:11.1f} us  torch {result['torch_us']:11.1f} us  ratio {result['ratio']:6.2f}"
            print(f"{case.name:52s} {times}  {extra}", flush=True)
    arguments.out.mkdir(parents=True, exist_ok=True)
    target = arguments.out / f"cpu_kernels-{report['date']}.json"
    target.write_text(json.dumps(report, indent=1) + "\n")
    print(f"wrote {target}")


if __name__ == "__main__":
    main()

"""Which way each scheduling and memory knob moves what: one workload, one model on one GPU, one knob at a time.

    python benchmarks/knobs.py [--profile FILE] [--rate 12] [--only policy,page_size] [--out benchmarks/results]

The scheduler is the real one, the worker is the cost model of `gristmill simulate`; without --profile it is the roofline of an 8B model
on 80 GB at 2 TB/s that docs/simulate.md works out. Everything is deterministic, so the numbers are the same on every machine.

The workload: conversations of one to five turns over eight system prompts, a tenth of them with documents of thousands of tokens, and
one request in twenty urgent (priority 10). The pool is small on purpose: knobs of memory move nothing while there is plenty.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import platform
import random
import subprocess
from pathlib import Path
from typing import Any

import numpy as np

import gristmill
from gristmill.options import Options
from gristmill.simulation.profile import HostCost, Profile, StepCost, load_profile
from gristmill.simulation.simulator import simulate
from gristmill.simulation.traces import TraceRequest, rescale

ROOFLINE = Profile(
    format="gristmill-profile-1",
    model="8B by roofline",
    hardware="80 GB at 2 TB/s, 300 TFLOP/s in bfloat16",
    step_s=StepCost(constant=0.0083, prefill_token=54e-6, decode_row=54e-6, decode_kv_token=6.6e-8, prefill_pair=1.7e-9),
    host_s=HostCost(submit=3e-4, plan=1e-4, apply=1e-4, edge=1e-4, gap=1e-4, deliver=5e-4),
    pool_tokens=60_000,
    max_context=16_384,
    page_size=1,
    made={"how": "roofline, by hand"},
)
BASE: dict[str, Any] = {"max_running": 64, "max_queued": 100_000}
KNOBS: dict[str, list[dict[str, Any]]] = {
    "pool_tokens": [{"pool_tokens": n} for n in (30_000, 60_000, 120_000, 240_000)],
    "page_size": [{"page_size": n} for n in (1, 16, 64)],
    "max_running": [{"max_running": n} for n in (16, 32, 64, 128)],
    "chunk_tokens": [{"chunk_tokens": n} for n in (128, 512, 2048, 0)],
    "max_prefill_tokens": [{"chunk_tokens": 0, "max_prefill_tokens": n} for n in (2048, 16384)],
    "mixed_chunks": [{"mixed_chunks": flag} for flag in (True, False)],
    "overlap": [{"overlap": flag} for flag in (True, False)],
    "radix_cache": [{"radix_cache": flag} for flag in (True, False)],
    "policy": [{"policy": name} for name in ("fcfs", "lpm", "dfs-weight", "shortest-prefill", "hrrn")],
    "preempt_threshold": [{"max_running": 16, "preempt_threshold": n} for n in (0, 10)],
    "eviction_policy": [{"eviction_policy": name} for name in ("lru", "lfu", "fifo", "priority", "slru")],
}


def workload(n_conversations: int, seed: int) -> list[TraceRequest]:
    """Arrivals at one conversation a second; a turn follows the one before by the time that reading and typing takes."""
    g = random.Random(seed)
    systems = [(f"system {i}", g.randrange(200, 900)) for i in range(8)]
    weights = [1 / (i + 1) for i in range(8)]
    requests = []
    for number in range(n_conversations):
        start, history = float(number), 0
        parts = [g.choices(systems, weights)[0]]
        if g.random() < 0.1:
            history += g.randrange(2000, 6000)
        for turn in range(g.choice([1, 1, 2, 3, 5])):
            history += g.randrange(10, 150)
            output = min(800, max(4, int(g.lognormvariate(4.6, 0.8))))
            priority = 10 if g.random() < 0.05 else 0
            requests.append(TraceRequest(start, output, (*parts, (f"conversation {number}", history)), priority=priority))
            history += output
            start += g.uniform(5, 25) + 10 * turn
    return sorted(requests, key=lambda request: request.t)


def measure(requests: list[TraceRequest], profile: Profile, changes: dict[str, Any]) -> dict[str, float]:
    options = Options(model="knobs", **{"page_size": profile.page_size, "pool_tokens": profile.pool_tokens, **BASE, **changes})
    result = simulate(requests, profile, options)
    summary = result.summary()
    urgent = [r.t_first - r.t_arrival for r, request in zip(result.records, requests) if request.priority and r.finished]
    return {
        "output_tokens_per_s": summary["output_tokens_per_s"],
        "ttft_p50_s": summary["ttft_s"]["p50"],
        "ttft_p90_s": summary["ttft_s"]["p90"],
        "ttft_p99_s": summary["ttft_s"]["p99"],
        "urgent_ttft_most_s": float(np.max(urgent)),
        "tpot_mean_ms": 1e3 * summary["tpot_s"]["mean"],
        "tpot_p99_ms": 1e3 * summary["tpot_s"]["p99"],
        "cache_hit_rate": summary["cache_hit_rate"],
        "retractions": summary["retractions"],
        "preemptions": summary["preemptions"],
    }


def row(label: str, m: dict[str, float]) -> str:
    return (
        f"| {label} | {m['output_tokens_per_s']:.0f} | {m['ttft_p50_s']:.2f} / {m['ttft_p90_s']:.2f} / {m['ttft_p99_s']:.1f} "
        f"| {m['urgent_ttft_most_s']:.2f} | {m['tpot_mean_ms']:.1f} / {m['tpot_p99_ms']:.0f} | {m['cache_hit_rate']:.1%} "
        f"| {m['retractions']:.0f} | {m['preemptions']:.0f} |"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--profile", type=Path)
    parser.add_argument("--conversations", type=int, default=250)
    parser.add_argument("--rate", type=float, default=12.0, help="requests per second")
    parser.add_argument("--only", default="", help="knobs to try, comma-separated")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "results")
    args = parser.parse_args()
    profile = load_profile(args.profile) if args.profile else ROOFLINE
    requests = rescale(workload(args.conversations, seed=1), rate=args.rate)
    print(f"{profile.model} on {profile.hardware}: {len(requests)} requests at {args.rate:g} per second")
    print(
        "| setting | output tokens/s | TTFT p50 / p90 / p99 s | urgent TTFT most s | TPOT mean / p99 ms | cached | retracted | preempted |"
    )
    print("|---|---|---|---|---|---|---|---|")
    results: dict[str, dict[str, float]] = {}
    for knob in args.only.split(",") if args.only else KNOBS:
        for changes in KNOBS[knob]:
            label = ", ".join(f"{name}={value}" for name, value in changes.items())
            if label not in results:
                results[label] = measure(requests, profile, changes)
            print(row(label, results[label]), flush=True)
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    path = args.out / f"knobs-{datetime.date.today()}.json"
    facts = {
        "date": str(datetime.date.today()),
        "commit": commit,
        "version": gristmill.__version__,
        "python": platform.python_version(),
        "rate": args.rate,
        "requests": len(requests),
        "base": {**BASE, **{f.name: f.default for f in dataclasses.fields(Options) if f.name in ("chunk_tokens", "policy")}},
        "profile": json.loads(profile.to_json()),
        "results": results,
    }
    args.out.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(facts, indent=1) + "\n")
    print(f"wrote {path}")


if __name__ == "__main__":
    main()

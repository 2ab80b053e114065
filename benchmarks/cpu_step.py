"""Where the time of a decode step goes: the share of every op, of Python, and the rate at which weights are read.

    python benchmarks/cpu_step.py [--model smollm2-135m] [--dtype float32] [--batch 1] [--context 128]

Drives the model worker's ModelRunner directly (no HTTP, no scheduler) under torch's profiler, after the same steps without it.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from pathlib import Path

os.environ.setdefault("GOMP_SPINCOUNT", "1000")  # as the server's worker runs; read when torch is loaded
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np
import torch

from gristmill.catalogue import resolve_model
from tests.support.direct_runner import DirectRunner

STEPS = 40


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2-135m")
    parser.add_argument("--dtype", default="float32", choices=("float32", "bfloat16"))
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--context", type=int, default=128)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    arguments = parser.parse_args()

    length = arguments.context + 2 * STEPS + 8
    runner = DirectRunner(
        resolve_model(arguments.model).path,
        dtype=arguments.dtype,
        threads=arguments.threads,
        context_length=length,
        pool_tokens=length * arguments.batch,
        max_running=arguments.batch,
    )
    rng = np.random.default_rng(0)
    vocab = runner.runner.config.vocab_size
    rows = [runner.add(rng.integers(3, vocab, arguments.context).tolist()) for _ in range(arguments.batch)]
    for _ in range(4):
        runner.step(rows)
    times = []
    for _ in range(STEPS):
        start = time.perf_counter()
        runner.step(rows)
        times.append(time.perf_counter() - start)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        start = time.perf_counter()
        for _ in range(STEPS):
            runner.step(rows)
        wall_us = (time.perf_counter() - start) * 1e6
    print(
        f"{arguments.model} {arguments.dtype}, batch {arguments.batch}, context {arguments.context}: "
        f"{statistics.median(times) * 1e3:.2f} ms per step (median of {STEPS}), {arguments.threads} threads"
    )
    events = sorted(profile.key_averages(), key=lambda event: -event.self_cpu_time_total)
    named = sum(event.self_cpu_time_total for event in events)
    for event in events[:8]:
        share = event.self_cpu_time_total / wall_us
        print(f"  {event.key:44s} {share:6.1%}  {event.self_cpu_time_total / STEPS / 1e3:7.3f} ms  {event.count // STEPS} calls")
    print(f"  {'Python between the ops':44s} {max(0.0, 1 - named / wall_us):6.1%}")


if __name__ == "__main__":
    main()
